"""fp32 master weights for any torch optimizer, for models whose own weights have 16 bits.

The wrapped optimizer updates the masters; each step ends by rounding them to the weights. The masters receive fp32
gradients, scaled and clipped: the caller must set ``master_of(parameter).grad`` before a step.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.optim.states.settings import apply_settings
from runner.optim.states.whole_norms import as_divided

__all__ = ["MASTER", "MasterWeights"]

MASTER = "master"
"""Key of a parameter's master weight in the optimizer's state."""


class MasterWeights(Optimizer):
    """An optimizer over 16-bit parameters; its state holds their fp32 masters and the wrapped optimizer's state.

    Its ``param_groups`` are the model's own parameters, so learning-rate schedulers and checkpoints by parameter name
    need not know about masters: ``state[parameter]`` is ``{"master": fp32 weight, …}``.

    Args:
        parameters: the model's.
        build: makes the wrapped optimizer over the masters; this one has the same groups.
    """

    def __init__(self, parameters: Sequence[Tensor], build: Callable[[list[Tensor]], Optimizer]) -> None:
        wide = (Parameter(parameter.detach().to(torch.float32, copy=True)) for parameter in parameters)
        masters = [as_divided(master, parameter) for master, parameter in zip(wide, parameters, strict=True)]
        inner = build(list(masters))
        weights = dict(zip(masters, parameters, strict=True))
        groups = [{**group, "params": [weights[master] for master in group["params"]]} for group in inner.param_groups]
        super().__init__(groups, dict(inner.defaults))
        self._inner = inner
        self._pairs = [(weights[master], master) for group in inner.param_groups for master in group["params"]]
        self._masters = dict(zip(parameters, masters, strict=True))
        self._publish()

    @property
    def inner(self) -> Optimizer:
        """The wrapped optimizer, over the masters."""
        return self._inner

    def master_of(self, parameter: Tensor) -> Parameter:
        """The fp32 weight from which ``parameter`` is rounded."""
        return self._masters[parameter]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters that have a ``grad``, then their weights; gradients of the weights are not read.

        Other weights are not written, not even with what they are: another stage's may be in use by a backward.
        """
        result = closure() if closure is not None else None
        self._set_inner_settings()
        self._inner.step()
        for parameter, master in self._pairs:
            if master.grad is not None:
                parameter.copy_(master)
        self._publish()
        return result

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Set the masters from the weights, after other code has changed the weights; states are kept."""
        for parameter, master in self._pairs:
            master.copy_(parameter)

    def take_out(self, parameter: Tensor) -> None:
        """Hold a parameter of the groups no longer, nor its master."""
        master = self._masters.pop(parameter)
        for group in self._inner.param_groups:
            group["params"][:] = [each for each in group["params"] if each is not master]
        self._inner.state.pop(master, None)
        self._pairs = [pair for pair in self._pairs if pair[1] is not master]

    def put_in(self, parameter: Tensor, group: int, entries: Mapping[str, Any]) -> None:
        """Hold a further parameter of a group, with its master and the wrapped optimizer's state in ``entries``."""
        master = self._masters[parameter] = Parameter(entries[MASTER])
        self._inner.param_groups[group]["params"].append(master)
        kept = {key: value for key, value in entries.items() if key != MASTER}
        if kept:
            self._inner.state[master] = kept
        weights = {each: weight for weight, each in self._masters.items()}
        self._pairs = [(weights[each], each) for one in self._inner.param_groups for each in one["params"]]
        self._publish()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but in full precision: torch would round every state to the weights' dtype."""
        apply_settings(self, state_dict["param_groups"])
        inner = {number: dict(entries) for number, entries in state_dict["state"].items()}
        for number, (_, master) in enumerate(self._pairs):
            if number in inner:
                with torch.no_grad():
                    master.copy_(inner[number].pop(MASTER))
        kept = {number: entries for number, entries in inner.items() if entries}
        self._inner.load_state_dict({"state": kept, "param_groups": self._inner.state_dict()["param_groups"]})
        self._set_inner_settings()
        self._publish()

    def _set_inner_settings(self) -> None:
        """Copy settings to the wrapped optimizer, because schedulers set the learning rate in this one's groups."""
        apply_settings(self._inner, self.param_groups)

    def _publish(self) -> None:
        for parameter, master in self._pairs:
            self.state[parameter] = {MASTER: master.detach(), **self._inner.state.get(master, {})}
