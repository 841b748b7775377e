"""Defines how a prediction of weights describes itself. The description needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from runner.config.schema import OptimizerConfig
from runner.errors import Problem, RequestError
from runner.optim.catalogue.kind import OptimizerKind
from runner.optim.catalogue.motion import Motion
from runner.targets import call_named, import_named

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NO_MOTION", "Moment", "OwnFormula", "PredictionKind", "linear"]

NO_MOTION = "its states do not say where it moves the weights"
_TARGET = "weight_prediction.target"


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known of one weight when it is predicted.

    Args:
        weight: its newest values.
        state: the optimizer's state of it.
        settings: the settings of its group in the optimizer.
        motion: how the optimizer moves it; None if the formula does not use this.
        gap: number of steps to look ahead.
        rate: learning rate of the step for which the prediction is made.
        rates: learning rates of the steps that are looked ahead, in order; ``gap`` of them if that is a whole number.
    """

    weight: Tensor
    state: Mapping[str, Any]
    settings: Mapping[str, Any]
    motion: Motion | None
    gap: float
    rate: float
    rates: Sequence[float]


def linear(moment: Moment) -> Tensor:
    """``w - gap * rate * direction``: the last step's direction, as many times as steps are looked ahead."""
    assert moment.motion is not None  # a rule requires it
    direction = moment.motion.direction(moment.state, moment.settings)
    return (direction * -(moment.gap * moment.rate)).add_(moment.weight)  # one temporary tensor


@dataclass(frozen=True, slots=True)
class OwnFormula:
    """A user's own formula by its name, with which a plan is written and read.

    Args:
        target: ``package.module:name`` of a function of a :class:`Moment`, or of a :class:`PredictionKind`.
        kwargs: further arguments of the function.
    """

    target: str
    kwargs: Mapping[str, Any]

    def __call__(self, moment: Moment) -> Tensor:
        found = self.found()
        function: Any = found.predict if isinstance(found, PredictionKind) else found
        version = moment.weight._version
        try:
            predicted: Tensor = call_named(_TARGET, self.target, function, moment, **self.kwargs)
        except RequestError as error:
            raise _with_states(error, moment) from error.__cause__
        if moment.weight._version != version:
            raise self._error("must leave the weight as it is", "It changed the newest values in place")
        if getattr(predicted, "shape", None) != moment.weight.shape:
            why = f"It returned {_described(predicted)} for {_described(moment.weight)}"
            raise self._error("must return a tensor of the weight's shape", why)
        return predicted

    def _error(self, rule: str, why: str) -> RequestError:
        return RequestError([Problem(_TARGET, self.target, rule, why)])

    def found(self) -> Any:
        """What the target names.

        Raises:
            RequestError: it cannot be imported.
        """

        def fits(found: object) -> bool:
            return callable(found) or (isinstance(found, PredictionKind) and found.predict is not None)

        return import_named(_TARGET, self.target, what="function or PredictionKind", fits=fits)


def _with_states(error: RequestError, moment: Moment) -> RequestError:
    """The error of a user's function, and the states that there are if it is about one that there is not."""
    cause, known = error.__cause__, [*moment.state, *moment.settings]
    if not isinstance(cause, KeyError) or any(key in known for key in cause.args):
        return error
    states = ", ".join(map(str, moment.state))
    told = f"The optimizer's states of a weight are {states}"
    return RequestError([replace(problem, why=f"{problem.why}. {told}") for problem in error.problems])


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"a tensor of {tuple(shape)}"


def _no_reason(motion: Motion) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionKind:
    """One way to predict weights.

    Args:
        name: what ``weight_prediction=`` calls it.
        description: what it does, in one line.
        predict: returns the predicted weight; None: nothing is predicted.
        reason_against: takes an optimizer that has a motion, and returns the reason why its weights cannot be predicted
            in this way, or None.
        flushed_gap: the gap in a flushed schedule if the request gives none; None: it must give one.
        whole_steps: whether the gap must be a whole number.
        temporaries: the most tensors of a parameter's size that a prediction has made and not yet dropped, at any time.
        reads: entries of a weight's optimizer state that the formula reads instead of the optimizer's motion.
    """

    name: str
    description: str
    predict: Callable[[Moment], Tensor] | None = field(repr=False)
    reason_against: Callable[[Motion], str | None] = field(default=_no_reason, repr=False)
    flushed_gap: float | None = None
    whole_steps: bool = False
    temporaries: int = 2
    reads: tuple[str, ...] = ()

    def problem_with(self, optimizer: OptimizerKind, section: OptimizerConfig) -> str | None:
        """The reason why this optimizer's weights cannot be predicted in this way, or None."""
        motion = optimizer.motion
        if motion is None:
            return NO_MOTION
        if "momentum" in optimizer.reads and "momentum_buffer" in motion.keys and not section.momentum:
            return "without momentum it has no direction but that of the last gradient"
        return self.reason_against(motion)
