"""What a checkpoint holds besides weights and optimizer, and how a run continues from it.

Progress is counted in batches. Lightning's own loop counters are derived from that number, so it does not matter in
which hook a checkpoint was saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from runner.checkpoint.file import CheckpointError, read_checkpoint
from runner.checkpoint.parts import DividedTensor
from runner.checkpoint.plain import MISSING
from runner.checkpoint.state import GROWN
from runner.config.compose.resolve import fingerprint, to_container
from runner.config.schema import RunConfig
from runner.environment import arithmetic
from runner.errors import Problem
from runner.optim.states.settings import apply_settings
from runner.training.data.places import Place

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["ENTRY", "History", "Progress", "follow_config", "loop_state", "other_data_problems", "read_progress"]

ENTRY = "runner"
"""Key of the checkpoint entry that holds a :class:`Progress`."""

_FORMAT = 2
_NEEDED = ("optimizer_states", "lr_schedulers")  # without which a run would go on as another one


@dataclass(frozen=True)
class History:
    """What the record says about the steps so far.

    Args:
        loss, seconds: one number per optimizer step.
        val_loss: ``[step, value]`` pairs.
        metrics: the same for other figures of validations, by name.
    """

    loss: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    val_loss: tuple[tuple[int, float], ...] = ()
    metrics: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        loss: Sequence[float],
        seconds: Sequence[float],
        val_loss: Sequence[Sequence[float]],
        metrics: Mapping[str, Sequence[Sequence[float]]],
    ) -> History:
        """The history from lists, as records and checkpoints have them."""
        pairs = {name: _pairs(values) for name, values in metrics.items()}
        return cls(tuple(loss), tuple(seconds), _pairs(val_loss), pairs)


@dataclass(frozen=True)
class Progress:
    """The progress of a run between two steps.

    Args:
        step: optimizer steps taken.
        batches: batches taken, over all epochs.
        batches_per_epoch: number of batches in the training data; None for an iterable dataset, which is one endless
            epoch.
        history: for the record.
        random: the random state of every rank, or of this rank only in a checkpoint in parts; see
            :mod:`runner.training.random_state`.
        config: the resolved configuration as plain containers.
        fingerprint: hash of that configuration.
        samples: number of training samples; None for an iterable dataset, and in checkpoints of earlier versions.
        arithmetic: see :func:`runner.environment.arithmetic`; empty in checkpoints of earlier versions.
        place: the place in iterable data whose state brings it back; else None.
        missing: what the checkpoint is without, because it could not be saved: why, by place. Only read, not written.
        grown: names of buffers that forwards have made or given another shape than the model's function.
    """

    step: int
    batches: int
    batches_per_epoch: int | None
    history: History
    random: Mapping[int, dict[str, Any]]
    config: dict[str, Any]
    fingerprint: str
    samples: int | None = None
    arithmetic: Mapping[str, str | None] = field(default_factory=dict)
    place: Place | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    grown: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        trainer: pl.Trainer,
        config: RunConfig,
        *,
        batches_per_epoch: int | None,
        samples: int | None,
        history: History,
        random: Mapping[int, dict[str, Any]],
        place_after: Callable[[int], Place | None] = lambda batches: None,
    ) -> Progress:
        """The progress of a trainer whose last step is complete.

        Args:
            place_after: the place in the data after a number of batches.
        """
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
        return cls(
            step=trainer.global_step,
            batches=batches,
            batches_per_epoch=batches_per_epoch,
            history=history,
            random=random,
            config=to_container(config),
            fingerprint=fingerprint(config),
            samples=samples,
            arithmetic=arithmetic(),
            place=place_after(batches),
        )

    @property
    def epoch(self) -> int:
        return self.batches // self.batches_per_epoch if self.batches_per_epoch is not None else 0

    @property
    def batch_in_epoch(self) -> int:
        return self.batches % self.batches_per_epoch if self.batches_per_epoch is not None else self.batches

    def missed_validation(self, are_due: Callable[[int], bool]) -> int | None:
        """The last step if its validation is due and did not come, because a failure came first; else None.

        A validation that has given no figure at all cannot be told from a missing one.

        Args:
            are_due: whether a validation follows a step.
        """
        figures = (self.history.val_loss, *self.history.metrics.values())
        validated = {step for pairs in figures for step, _ in pairs}
        return self.step if are_due(self.step) and self.step not in validated else None

    def random_of(self, rank: int) -> dict[str, Any]:
        """The random state of a rank; a rank that the saved run did not have takes that of rank 0."""
        return self.random.get(rank, self.random[0])

    def to_entry(self) -> dict[str, Any]:
        """The entry for the checkpoint, made of tensors and plain values."""
        return {
            "format": _FORMAT,
            "step": self.step,
            "batches": self.batches,
            "batches_per_epoch": self.batches_per_epoch,
            "loss": torch.tensor(self.history.loss, dtype=torch.float64),
            "seconds": torch.tensor(self.history.seconds, dtype=torch.float64),
            "val_loss": [list(pair) for pair in self.history.val_loss],
            "metrics": {name: [list(pair) for pair in pairs] for name, pairs in self.history.metrics.items()},
            "random": dict(self.random),
            "config": json.dumps(self.config),
            "fingerprint": self.fingerprint,
            "samples": self.samples,
            "arithmetic": dict(self.arithmetic),
            "place": self.place.to_entry() if self.place is not None else None,
        }

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Progress:
        """The inverse of :meth:`to_entry`."""
        loss, seconds = entry["loss"].tolist(), entry["seconds"].tolist()
        history = History.of(loss, seconds, entry["val_loss"], entry.get("metrics", {}))
        return cls(
            step=entry["step"],
            batches=entry["batches"],
            batches_per_epoch=entry["batches_per_epoch"],
            history=history,
            random=entry["random"],
            config=json.loads(entry["config"]),
            fingerprint=entry["fingerprint"],
            samples=entry.get("samples"),
            arithmetic=entry.get("arithmetic", {}),
            place=Place.from_entry(entry["place"]) if entry.get("place") is not None else None,
        )


def _pairs(validations: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(step), float(value)) for step, value in validations)


def read_progress(path: Path) -> tuple[Progress, dict[str, torch.Tensor | DividedTensor]]:
    """The progress and the weights in a checkpoint of a training run, each a tensor or, with its shape, parts of one.

    Raises:
        CheckpointError: the file is damaged, or was not written by the runner's own training.
    """
    content = read_checkpoint(path, divided=True)
    entry = content.get(ENTRY)
    if not isinstance(entry, dict) or entry.get("format") != _FORMAT:
        raise CheckpointError("it was not written by `runner train` of this version")
    missing: dict[str, str] = content.get(MISSING, {})
    for place, why in missing.items():
        if place.startswith(_NEEDED):
            raise CheckpointError(f"it has weights, but is without {place}: {why}")
    found = replace(Progress.from_entry(entry), missing=missing, grown=frozenset(content.get(GROWN, ())))
    return found, content["state_dict"]


def other_data_problems(
    config: RunConfig, found: Progress, steps: int | None, samples: int | None
) -> Iterator[Problem]:
    """Why a run with data of another length cannot continue from a checkpoint.

    Args:
        config: the request.
        found: the checkpoint's progress.
        steps, samples: the numbers of an epoch of the request's data; None for an iterable dataset.
    """
    if steps != found.batches_per_epoch:
        rule = f"must have {_steps_said(found.batches_per_epoch)} per epoch, as the checkpoint's data"
        why = f"These have {_steps_said(steps)}, so that the place in the data would be another one"
        yield Problem("data", config.data.name, rule, why, "resume=null")
    elif found.samples is not None and samples != found.samples:
        rule = f"must have {found.samples} samples, as the checkpoint's data"
        why = f"These have {samples}, so that each epoch would have another order"
        yield Problem("data", config.data.name, rule, why, "resume=null")


def _steps_said(steps: int | None) -> str:
    return f"{steps} steps" if steps is not None else "an unknown number of steps"


def loop_state(trainer: pl.Trainer, progress: Progress, *, validates: Callable[[int], bool]) -> dict[str, Any]:
    """The state of Lightning's loops between two batches, in the form of Lightning's own checkpoints.

    Args:
        validates: whether a validation follows a step.
    """
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    epochs, batches, current = progress.epoch, progress.batches, progress.batch_in_epoch
    begun = epochs + (current > 0)  # an epoch without any batch taken has not begun
    _count(state["epoch_progress"], _passed(epochs, begun), _passed(epochs, begun))
    _count(state["epoch_loop.batch_progress"], _passed(batches), _passed(current))
    _count(state["epoch_loop.scheduler_progress"], _passed(progress.step), _passed(current))
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for tracker in ("step", "zero_grad"):
        _count(optimizer[tracker], _passed(progress.step), _passed(current))
    # If a validation is due at the restart, Lightning skips it but counts one step for its loggers.
    interval = trainer.val_check_interval
    due = isinstance(interval, int) and batches % interval == 0
    due = due or progress.missed_validation(validates) is not None  # after the last step it has no interval
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = progress.step - int(due)
    return {"fit_loop": state}


def _passed(finished: int, begun: int | None = None) -> dict[str, int]:
    started = finished if begun is None else begun
    return {"ready": started, "started": started, "processed": finished, "completed": finished}


def _count(tracker: dict[str, Any], total: dict[str, int], current: dict[str, int]) -> None:
    for name, counts in (("total", total), ("current", current)):
        tracker[name] = {key: counts[key] for key in tracker[name]}


def follow_config(trainer: pl.Trainer, requested: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Apply the settings of the request (learning rate, betas, decay, …), and keep only the optimizer's state.

    Args:
        requested: per optimizer, the settings of its parameter groups before the checkpoint was loaded. Each group
            gets its own again, because a custom optimizer may have groups that differ.
    """
    for optimizer, settings in zip(trainer.optimizers, requested, strict=True):
        apply_settings(optimizer, settings)
    for each in trainer.lr_scheduler_configs:
        scheduler = each.scheduler
        if isinstance(scheduler, LambdaLR):
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
            rates = [
                base * rate(scheduler.last_epoch)
                for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate_now in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate_now
            scheduler._last_lr = rates
