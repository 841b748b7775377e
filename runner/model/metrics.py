"""Metrics of a user: functions of (output, target) that are evaluated at validations beside the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torch import Tensor

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, RunnerError
from runner.model.targets import explained
from runner.targets import import_target

__all__ = ["Figure", "KeptLogs", "Metric", "StepFigures", "load_metrics", "metric_problems"]


@dataclass(frozen=True)
class Metric:
    """One metric of a request.

    Args:
        name: the part of ``metrics.NAME`` after the dot; its values are written as ``val_NAME``.
        target: ``package.module:function``.
        function: what ``target`` names; returns the mean over its samples, or ``(sum, weight)``.
        logged_as: the name under which it is logged, if a step of the user's has logged it; empty: ``val_NAME``.
    """

    name: str
    target: str
    function: Callable[[Any, Any], Any]
    logged_as: str = ""

    def measure(self, output: Any, target: Any, num_samples: int) -> tuple[float, float]:
        """``(sum, weight)`` over a micro-batch; a mean gets its number of samples as weight.

        Raises:
            RequestError: the function raises, or returns neither a number nor a pair of numbers.
        """
        try:
            value = self.function(output, target)
        except (RunnerError, MemoryError):
            raise
        except Exception as error:
            raise self._refused("must run on the model's output and the target", explained(error)) from error
        return self._pair(value, num_samples)

    def _pair(self, value: Any, num_samples: int) -> tuple[float, float]:
        pair = value if isinstance(value, tuple) else (value, num_samples)
        numbers = [_number(each) for each in pair]
        rule = "must return a number, the mean over its samples, or (sum, weight)"
        if len(pair) != 2 or numbers[0] is None or numbers[1] is None:
            raise self._refused(rule, f"It returned {_described(value)}")
        total, weight = numbers[0], numbers[1]
        if math.isnan(total) or not (math.isfinite(weight) and weight >= 0):
            why = (
                f"It returned {_described(value)} for {num_samples} samples; a sample that does not count has weight 0"
            )
            raise self._refused(f"{rule}, which are numbers, with a weight of 0 or above", why)
        return (total, weight) if isinstance(value, tuple) else (total * num_samples, weight)

    def _refused(self, rule: str, why: str) -> RequestError:
        return RequestError([Problem(f"metrics.{self.name}", self.target, rule, why)])


@dataclass(frozen=True)
class Figure:
    """A value that a LightningModule logs: its name, and where ``log`` was told to show it."""

    name: str
    shown: Mapping[str, Any]


@dataclass
class StepFigures:
    """What a traced ``training_step`` logs beside its loss.

    Args:
        figures: what they are called, in the order of ``values``; the same on every rank.
        values: scalars of the last micro-batch, which the loss function sets at each call.
    """

    figures: tuple[Figure, ...]
    values: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class KeptLogs:
    """What the steps of a LightningModule log that are traced.

    Args:
        figures: what ``training_step`` logs beside the loss.
        validation: what ``validation_step`` logs.
        left_out: for each step that was traced, the names of what else it logs.
    """

    figures: StepFigures | None = None
    validation: tuple[Metric, ...] = ()
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load_metrics(targets: Mapping[str, str]) -> tuple[Metric, ...]:
    """The metrics of a request, in its order.

    Args:
        targets: the section ``metrics``, name to ``package.module:function``.

    Raises:
        RequestError: a function cannot be imported.
    """
    return tuple(Metric(name, target, import_target(f"metrics.{name}", target)) for name, target in targets.items())


def metric_problems(config: RunConfig, *, has_validation: bool) -> Iterator[Problem]:
    """A problem if there are metrics and nothing to measure."""
    if config.metrics and not has_validation:
        why = f"{config.data.target} returns no validation set, at whose end they would be evaluated"
        yield Problem("metrics", ",".join(config.metrics), "need a validation set", why)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, Real) else None


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else f"{float(value.detach())}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({', '.join(_described(each) for each in value)})"
    return str(value) if isinstance(value, Real) else f"a {type(value).__name__}"
