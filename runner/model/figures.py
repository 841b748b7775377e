"""Figures that a LightningModule logs in its steps, as sums that ranks can add."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

__all__ = ["Figure", "SummedMetric", "WithFigures", "bare"]

_MOST_STATES = 4096  # numbers, which every rank gets with the loss


class SummedMetric:
    """A metric of torchmetrics whose states are sums: those of all micro-batches give its value over all samples.

    Args:
        metric: an object that the user's module holds; it is copied.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = deepcopy(metric)
        self._metric.sync_on_compute = False
        self._metric.reset()
        self._shapes = {name: default.shape for name, default in metric._defaults.items()}
        self.count = sum(shape.numel() for shape in self._shapes.values())

    @staticmethod
    def of(metric: Any) -> SummedMetric | None:
        """The metric as a sum, or None if it keeps all samples, means or anything else, or its value is no scalar."""
        reductions = getattr(metric, "_reductions", {}).values()
        if not reductions or any(getattr(each, "__name__", "") != "dim_zero_sum" for each in reductions):
            return None
        if not all(isinstance(default, Tensor) for default in metric._defaults.values()):
            return None
        with suppress(Exception):  # a user's metric may hold what cannot be copied
            made = SummedMetric(metric)
            return made if made.count <= _MOST_STATES and made._computed().numel() == 1 else None
        return None

    def states(self, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> Tensor:
        """The states after these arguments alone, float64; zeros for tensors without values."""
        tensors = [*args, *kwargs.values()]
        if detect_fake_mode(tensors) is not None:
            return torch.zeros(self.count, dtype=torch.float64)
        with torch.no_grad():
            if tensors:
                self._metric.to(tensors[0].device)
            self._metric.update(*args, **kwargs)
            made = [getattr(self._metric, name).reshape(-1).double().cpu() for name in self._shapes]
            self._metric.reset()
        return torch.cat(made)

    def value(self, sums: Tensor) -> float:
        """The metric's value of summed states."""
        start = 0
        for name, shape in self._shapes.items():
            now = getattr(self._metric, name)
            setattr(self._metric, name, sums[start : start + shape.numel()].reshape(shape).to(now.device, now.dtype))
            start += shape.numel()
        return float(self._computed())

    def _computed(self) -> Tensor:
        self._metric._update_count = 1  # otherwise torchmetrics warns
        made: Tensor = self._metric.compute()
        self._metric.reset()
        return made


@dataclass(frozen=True)
class Figure:
    """A value that a step logs.

    Args:
        name: the name under which it is logged.
        shown: where ``log`` was told to show it.
        metric: what computes it; None: it is a scalar, of which the mean over the samples is logged.
        keywords: the names of those of the metric's arguments that are given by name, the last ones.
        takes: the number of values that are computed for it.
    """

    name: str
    shown: Mapping[str, Any] = field(default_factory=dict)
    metric: SummedMetric | None = None
    keywords: tuple[str, ...] = ()
    takes: int = 1

    @property
    def num_rows(self) -> int:
        """The number of sums that it is made of."""
        return 1 if self.metric is None else self.metric.count

    def rows(self, values: Sequence[Any], samples: int) -> Tensor:
        """A row ``[sum, weight]`` for each of its sums over a micro-batch, float64.

        Args:
            values: the scalar, or what the metric takes, flat.
            samples: the number of samples.
        """
        if self.metric is None:
            sums = values[0].detach().reshape(1).double().cpu() * samples
        else:
            count = len(values) - len(self.keywords)
            sums = self.metric.states(values[:count], dict(zip(self.keywords, values[count:], strict=True)))
        return torch.stack([sums, torch.full_like(sums, float(samples))], 1)

    def value(self, rows: Tensor) -> float:
        """What is logged, of the sums of rows over all micro-batches; NaN if no sample counts."""
        if not len(rows) or not float(rows[0, 1]):
            return math.nan
        return float(rows[0, 0] / rows[0, 1]) if self.metric is None else self.metric.value(rows[:, 0])


@dataclass(frozen=True)
class WithFigures:
    """What a loss function returns that computes figures as well.

    Args:
        loss: what it would return without them.
        values: what the figures need, flat, in their order.
    """

    loss: Any
    values: tuple[Any, ...]

    def rows(self, figures: Sequence[Figure], samples: int) -> Tensor:
        """The rows of all figures, one after the other."""
        left, rows = list(self.values), []
        for figure in figures:
            rows.append(figure.rows(left[: figure.takes], samples))
            left = left[figure.takes :]
        return torch.cat(rows)


def bare(made: Any) -> Any:
    """What a loss function returned, without figures."""
    return made.loss if isinstance(made, WithFigures) else made
