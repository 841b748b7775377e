"""Trains a whole request in this process, as the command does: checked, planned, run by all ranks, recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rank_threads import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from runner.config.schema import RunConfig
from runner.launch.run.prepare import prepare, write_request
from runner.plan.values import RunPlan
from runner.record import RunRecord
from runner.strategy.pipeline import EngineStrategy
from runner.training.callbacks import StepClock
from runner.training.run import run_rank


@dataclass
class Run:
    """What a run has given.

    Attributes:
        gradients: for each step, the gradients by name as the optimizer got them, of each rank that holds them.
        weights: the weights and buffers of each rank at the end; buffers of the first replica alone.
        norms: for each step that has ended, the norm of all gradients as each rank was told it.
        left: what buffers and mailboxes still hold at the end.
    """

    plan: RunPlan
    record: RunRecord
    gradients: list[dict[str, list[Tensor]]] = field(default_factory=list)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)
    norms: list[list[float | None]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return self.record.loss


class _Watch(Callback):
    """Notes gradients before updates, norms after them, and weights at the end."""

    def __init__(self, run: Run, begin: int) -> None:
        self._run, self._begin = run, begin

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, EngineStrategy)
        assert strategy.engine is not None
        place = strategy.engine.updating - self._begin
        while len(self._run.gradients) <= place:
            self._run.gradients.append({})
        with _disable_current_modes():  # copies are not counted as memory of a rank
            for stage in strategy.engine.stages.values():
                for name, parameter in stage.named_parameters():
                    if parameter.grad is not None:
                        found = self._run.gradients[place].setdefault(stage.global_name(name), [])
                        found.append(parameter.grad.detach().clone())

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by another class of Lightning
        self._run.norms += [[each.grad_norm] for each in callbacks if isinstance(each, StepClock)]

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, EngineStrategy)
        assert strategy.engine is not None
        with torch.no_grad(), strategy.whole_weights():
            for stage in strategy.engine.stages.values():
                parameters = {stage.global_name(name) for name, _ in stage.named_parameters(remove_duplicate=False)}
                for name, tensor in stage.global_state().items():
                    if name in parameters or not strategy.replica:
                        self._run.weights.setdefault(name, []).append(tensor.detach().clone())


def train(config: RunConfig, run_dir: Path, *, rehearse: bool = False, begin: int = 0) -> Run:
    """Train the request in threads.

    Args:
        config: the resolved request.
        run_dir: an empty folder, or that of the run that is continued.
        rehearse: whether the ranks measure their stages before the first step, as the command does.
        begin: the step from which it is continued.

    Raises:
        RequestError, DoesNotFitError: as the command.
    """
    config.run_dir = str(run_dir)
    plan = prepare(config, place_is_made=True)
    write_request(config, plan, run_dir, command="runner train")
    run = Run(plan, RunRecord())
    ranks = [Run(plan, run.record) for _ in range(plan.topology.world_size)]
    with contextlib.ExitStack() as held:
        if not rehearse:
            held.enter_context(mock.patch("runner.training.run.measured_plan", lambda strategy, *given: strategy.plan))
        run_ranks(
            plan.topology.world_size,
            lambda rank: run_rank(config, run_dir, watchers=[_Watch(ranks[rank], begin)], validate=False),
        )
    for own in ranks:  # in this order, whichever has ended first
        _join(run, own)
    run.record = RunRecord.load(run_dir)
    return run


def _join(run: Run, own: Run) -> None:
    """Add what one rank has seen."""
    run.gradients += [{} for _ in own.gradients[len(run.gradients) :]]
    run.norms += [[] for _ in own.norms[len(run.norms) :]]
    for all_norms, norms in zip(run.norms, own.norms, strict=True):
        all_norms += norms
    for found, step in [(run.weights, own.weights), *zip(run.gradients, own.gradients, strict=False)]:
        for name, tensors in step.items():
            found.setdefault(name, []).extend(tensors)


def peaks(run: Run) -> Sequence[tuple[int, int]]:
    """``(counted, predicted)`` bytes of each rank."""
    said = run.record.peak_memory_bytes
    return list(zip(said["measured"], said["predicted"], strict=True))


def require_peaks(run: Run, least: float = 0.99) -> None:
    """No rank has needed more than was predicted, and each at least a share of that."""
    for counted, predicted in peaks(run):
        assert least * predicted <= counted <= predicted
