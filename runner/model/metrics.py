"""Metrics of a user: functions of (output, target) that are evaluated at validations beside the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, RunnerError
from runner.model.figures import Figure
from runner.model.targets import explained
from runner.targets import import_target

__all__ = ["KeptLogs", "LoggedMetric", "Metric", "load_metrics", "metric_problems", "of_metrics"]


@dataclass(frozen=True)
class Metric:
    """One metric of a request.

    Args:
        name: the part of ``metrics.NAME`` after the dot; its values are written as ``val_NAME``.
        target: ``package.module:function``.
        function: what ``target`` names; returns the mean over its samples, or ``(sum, weight)``.
    """

    name: str
    target: str
    function: Callable[[Any, Any], Any]

    @property
    def num_rows(self) -> int:
        """The number of sums that it is made of."""
        return 1

    @property
    def label(self) -> str:
        """The name under which its values of a validation are logged."""
        return f"val_{self.name}"

    def rows(self, output: Any, target: Any, num_samples: int) -> Tensor:
        """The rows ``[sum, weight]`` of its sums over a micro-batch, float64.

        Raises:
            RequestError: see :meth:`measure`.
        """
        return torch.tensor([self.measure(output, target, num_samples)], dtype=torch.float64)

    def value(self, rows: Tensor) -> float:
        """Its value, of the sums of rows over all micro-batches; NaN if nothing counts."""
        return float(rows[0, 0] / rows[0, 1])

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
class LoggedMetric(Metric):
    """A figure that a user's traced ``validation_step`` logs; its ``function`` gives what the figure needs, flat."""

    figure: Figure = Figure("")

    @property
    def num_rows(self) -> int:
        return self.figure.num_rows

    @property
    def label(self) -> str:
        return self.figure.name

    def rows(self, output: Any, target: Any, num_samples: int) -> Tensor:
        """The rows over a micro-batch; a scalar that is not a number does not count."""
        made = self.figure.rows(self.function(output, target), num_samples)
        return torch.zeros_like(made) if self.figure.metric is None and made.isnan().any() else made

    def value(self, rows: Tensor) -> float:
        return self.figure.value(rows)


@dataclass(frozen=True)
class KeptLogs:
    """What the steps of a LightningModule log that are traced.

    Args:
        figures: what ``training_step`` logs beside the loss.
        validation: what ``validation_step`` logs.
        left_out: for each step that was traced, the names of what else it logs.
    """

    figures: tuple[Figure, ...] = ()
    validation: tuple[LoggedMetric, ...] = ()
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)


def of_metrics(metrics: Sequence[Metric], rows: Tensor) -> tuple[Tensor, ...]:
    """The rows of each metric, of those of all."""
    return torch.split(rows, [metric.num_rows for metric in metrics])


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
