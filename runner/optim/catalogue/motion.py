"""Says how an optimizer moves weights, as its states tell. The description needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ADAM_MOTION", "LAST_GRADIENT", "Motion", "Settings", "State"]

State = Mapping[str, Any]
Settings = Mapping[str, Any]

LAST_GRADIENT = "last_gradient"
"""Key, in a weight's state, of the gradient of the last step, kept for optimizers whose direction needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """How an optimizer moves a weight, as far as its states tell.

    Args:
        family: optimizers whose directions have one formula: ``momentum`` or ``adam``, or the optimizer's own name.
        keys: the entries of a weight's state that are read; a weight whose state lacks one has made no step yet.
        direction: takes a weight's state and the settings of its group, and returns the vector that a step subtracts
            from the weight when it is multiplied by the learning rate.
        coasted: takes weight, state, settings and the learning rates of the next steps, and returns the weight after
            these steps if all further gradients were zero; None: this is not known.
        needs_gradient: whether ``direction`` reads :data:`LAST_GRADIENT`, one more value per element.
    """

    family: str
    keys: tuple[str, ...]
    direction: Callable[[State, Settings], Tensor] = field(repr=False)
    coasted: Callable[[Tensor, State, Settings, Sequence[float]], Tensor] | None = field(default=None, repr=False)
    needs_gradient: bool = False

    def has_begun(self, state: State) -> bool:
        """Whether the optimizer has made a step with this weight."""
        return all(state.get(key) is not None for key in self.keys)


def _adam_direction(state: State, settings: Settings) -> Tensor:
    return _adam_after(state, settings, 0)


def _adam_after(state: State, settings: Settings, more: int) -> Tensor:
    """Adam's direction ``more`` steps later, if the gradients of these steps are zero and v stays as it is."""
    first, second = settings["betas"]
    steps = float(state["step"]) + more
    root = (state["exp_avg_sq"] / (1 - second**steps)).sqrt_().add_(settings["eps"])
    direction: Tensor = (state["exp_avg"] * first**more).div_(1 - first**steps).div_(root)
    return direction


def _adam_coasted(weight: Tensor, state: State, settings: Settings, rates: Sequence[float]) -> Tensor:
    decay = settings["weight_decay"] if settings.get("decoupled_weight_decay") else 0.0
    for number, rate in enumerate(rates, 1):
        weight = weight * (1 - rate * decay) - rate * _adam_after(state, settings, number)
    return weight


ADAM_MOTION = Motion(
    family="adam",
    keys=("exp_avg", "exp_avg_sq", "step"),
    direction=_adam_direction,
    coasted=_adam_coasted,
)
"""Adam's and AdamW's: m_hat / (sqrt(v_hat) + eps). Weight decay enters coasting alone."""
