"""Sums of a validation over batches and replicas, and the means that all ranks get of them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from runner.model.metrics import Metric, of_metrics
from runner.strategy.pipeline import EngineStrategy

__all__ = ["LOSS", "PREFIX", "LoggedFigures", "ValidationSums", "figures_of", "note_means"]

LOSS = "loss"
"""The name of the loss among the figures of a validation; no metric may have it."""

PREFIX = "val_"

_MEAN = ("mean", torch.mean)

_LOG = inspect.signature(pl.LightningModule.log)

logger = logging.getLogger(__name__)


class ValidationSums:
    """Rows ``[sum, weight]`` of the loss and of metrics by name, over the batches of this rank's replica."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: float, weight: float) -> None:
        """Add what a batch, or a part of it, has given."""
        self._add(name, torch.tensor([[total, weight]], dtype=torch.float64))

    def _add(self, name: str, rows: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0) + rows

    def add_all(self, metrics: Sequence[Metric], pairs: Iterable[tuple[float, float]]) -> None:
        """Add the loss, and then these metrics, as :meth:`EngineStrategy.validate` returns them."""
        rows = torch.tensor(list(pairs), dtype=torch.float64)
        self._add(LOSS, rows[:1])
        for metric, part in zip(metrics, of_metrics(metrics, rows[1:]), strict=True):
            self._add(metric.name, part)

    def means(self, strategy: EngineStrategy, metrics: Iterable[Metric] = ()) -> dict[str, float]:
        """The value over the samples of all replicas by name, the same on every rank; afterwards the sums are empty.

        All ranks must call it after the same batches. The ranks of a pipeline have the same sums, of which one counts.
        A figure of which no sample counted has no value, and is left out.

        Args:
            strategy: reaches the other ranks.
            metrics: they say how their values follow from sums; any other value is a sum divided by its weight.
        """
        sums, self._sums = self._sums, {}
        parts = dict(reversed(strategy.all_gather_objects((strategy.replica, sums))))
        whole: dict[str, Tensor] = {}
        for _, part in sorted(parts.items()):
            for name, rows in part.items():
                whole[name] = whole.get(name, 0) + rows
        counted = {name for name, rows in whole.items() if rows[0, 1]}
        for name in whole.keys() - counted - {LOSS}:
            logger.info("%s has no mean: the weights of all samples are 0", name)
        values = {metric.name: metric.value for metric in metrics}
        return {name: values.get(name, _mean)(rows) for name, rows in whole.items() if name in counted}


def _mean(rows: Tensor) -> float:
    return float(rows[0, 0] / rows[0, 1])


class LoggedFigures:
    """What a LightningModule's own ``validation_step`` logs, as means over the samples of all replicas.

    Lightning keeps what each rank has logged, so that files would show the figures of one replica. What Lightning
    would not reduce to a mean over the set is left to it.

    Args:
        own_log: the module's own ``log``.
    """

    def __init__(self, own_log: Callable[..., None]) -> None:
        self._own_log = own_log
        self._sums = ValidationSums()
        self._shown: dict[str, dict[str, Any]] = {}  # by name, the arguments that say where it is shown
        self._objects: dict[str, Any] = {}  # metrics of torchmetrics, which Lightning computes and resets

    @property
    def names(self) -> Collection[str]:
        """The names that have been logged on this rank."""
        return self._shown.keys()

    def log(self, samples: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take the place of the module's ``log`` within ``validation_step``.

        Args:
            samples: number of samples of the batch.
            name, value, args, kwargs: what ``log`` of a LightningModule takes.
        """
        kwargs.setdefault("batch_size", samples)
        given = _LOG.bind(None, name, value, *args, **kwargs).arguments
        number = value if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1) else None
        is_mean = given.get("reduce_fx", "mean") in _MEAN and given.get("on_epoch") is not False
        if _is_metric(value) and given.get("on_epoch") is not False:
            self._objects[name] = value
        if number is None or not is_mean or given.get("on_step") or given.get("rank_zero_only"):
            self._own_log(name, value, *args, **kwargs)
            return
        weight = given["batch_size"]
        self._sums.add(name, float(number) * weight, weight)
        self._shown[name] = {key: given[key] for key in ("prog_bar", "logger") if key in given}

    def means(self, strategy: EngineStrategy) -> dict[str, float]:
        """Log the means of the validation by the module's own ``log``, and return them; all ranks must call it."""
        shown = {name: how for part in strategy.all_gather_objects(self._shown) for name, how in part.items()}
        means = self._sums.means(strategy)
        for name, value in means.items():
            self._own_log(name, value, batch_size=1, **shown[name])
        return means | self._of_objects(strategy)

    def _of_objects(self, strategy: EngineStrategy) -> dict[str, float]:
        """What the metric objects give that all ranks have logged; each computes over the samples of all replicas."""
        objects, self._objects = self._objects, {}
        everywhere = set.intersection(*map(set, strategy.all_gather_objects(sorted(objects))))
        values = {name: objects[name].compute() for name in sorted(everywhere)}
        return {name: float(each) for name, each in values.items() if isinstance(each, Tensor) and each.numel() == 1}


def _is_metric(value: object) -> bool:
    """Whether a value is a metric of torchmetrics, which need not be imported to tell."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def figures_of(logged: Mapping[str, float]) -> dict[str, float]:
    """The logged values that are figures of a validation, ``val_NAME``, by their names without the prefix."""
    return {name.removeprefix(PREFIX): value for name, value in logged.items() if name.startswith(PREFIX)}


def note_means(module: Any, step: int, means: Mapping[str, float]) -> None:
    """Add the figures of the validation after a step to the lists of a :class:`TrainedModule`."""
    for name, value in means.items():
        if name == LOSS:
            module.val_losses.append([step, value])
        else:
            module.val_metrics.setdefault(name, []).append([step, value])
