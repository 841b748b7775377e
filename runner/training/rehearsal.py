"""Plays the first steps of a run on tensors without memory, and counts what each rank of a pipeline needs at most.

The run's own stages, engine, optimizer and meter do what they do in a run: nothing about bytes is written down here.
Only messages, and values that a step asks for, are made up (:mod:`runner.engine.transport.pretended`,
:mod:`runner.model.fake_run`). So a peak that is played is the one that a run counts, where a plan's may be a bound.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import nn

from runner.config.schema import RunConfig
from runner.engine.transport.pretended import PretendedTransport, play_ranks
from runner.engine.update.update import Update
from runner.engine.window import StepBatch
from runner.errors import RunFailedError
from runner.model.apart import ApartError, apart
from runner.model.boundary import map_tensors
from runner.model.data import example_batch
from runner.model.fake_run import PlayedTensors, changed_in_place
from runner.model.load import LoadedModel
from runner.plan.later_cuts import held_in_moves, with_cut
from runner.plan.layout.batches import split_sizes
from runner.plan.rules.zero import shares_by_itself
from runner.plan.values import RunPlan
from runner.profiling.real_sizes import RealSizes
from runner.strategy.checkpoints_by_name import num_bytes
from runner.strategy.pipeline import EngineStrategy
from runner.training.lightning_module import trainable
from runner.training.rank_parts import make_strategy, planned_model

__all__ = ["Rehearsed", "rehearse_run"]

_AT_ONCE: dict[str, Any] = {
    "speeds": (), "offload_delay_seconds": 0.0, "offload_bytes_per_second": None, "offload_drive": None
}  # fmt: skip
"""Options with which nothing waits that would in an experiment, and no file is written."""


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal has counted.

    Args:
        peak_bytes: the peaks of a pipeline's ranks by position, of the replica that needs most there; empty: the run
            could not be played.
        reason: why not.
    """

    peak_bytes: tuple[int, ...] = ()
    reason: str = ""


def rehearse_run(config: RunConfig, plan: RunPlan) -> Rehearsed:
    """Play a run's first steps and count.

    Args:
        config: the request.
        plan: its plan.
    """
    if plan.cuts:
        return _of_cuts(config, plan)
    if (why := _why_not(config, plan)) is not None:
        return Rehearsed(reason=why)
    try:
        return Rehearsed(apart(_play, config, plan))
    except (ApartError, RunFailedError) as error:  # a user's code may do anything that fake tensors cannot
        return Rehearsed(reason=str(error).partition("\n")[0])


def _of_cuts(config: RunConfig, plan: RunPlan) -> Rehearsed:
    """The peaks of a run whose layers move: each cut is played as a run of its own; a move has weights and states."""
    cuts = [cut for _, cut in plan.cuts]
    peaks = [move.peak_bytes for move in held_in_moves(cuts, copies=config.checkpoint.asynchronous)]
    for cut in cuts:
        found = rehearse_run(with_cut(config, [first for first, _ in cut.partition[1:]]), cut)
        if not found.peak_bytes:
            return found
        peaks.append(found.peak_bytes)
    return Rehearsed(tuple(map(max, *peaks)))


def _why_not(config: RunConfig, plan: RunPlan) -> str | None:
    """Why the run cannot be played, as far as it is known before; None: it can be tried."""
    if config.zero.stage is not None and not shares_by_itself(config, plan.schedule):
        return "what DeepSpeed's engine holds is known to its own processes alone"
    if plan.schedule.ahead:
        return "a rank's next action depends on what has arrived"
    if plan.profile.sizes_vary:
        return "batches have different sizes"
    if config.compile:
        return "what a compiler saves is not predicted"
    return None


def _play(config: RunConfig, plan: RunPlan) -> tuple[int, ...]:
    sizes = split_sizes(config.data.batch_size, plan.layout["data"])
    if config.zero.stage is None and not config.checkpoint.asynchronous:
        sizes = sizes[:1]  # the first replica has the most samples, and all have the same weights, and save none
    batches = {size: example_batch(config.data, size, config.seed) for size in set(sizes)}
    tensors = PlayedTensors()
    with tensors, RealSizes(), changed_in_place():
        with tensors.all_fake():
            model = planned_model(config, plan, 0)
            layers = [each if each.given is None else replace(each, given=each.build()) for each in model.layers]
            model = replace(model, layers=layers)  # as they run: dividing tokens makes other modules of those given

        def pipeline(replica: int, size: int, clipping: _Clipping | None) -> list[int]:
            ranks = plan.topology.pipeline_group(replica, 0)
            copies = {rank: _copy(model) for rank in ranks}  # before any of them belongs to a rank
            play = _PlayedRank(config, plan, copies, tensors, batches[size], size, clipping)
            return play_ranks(ranks, play)

        peaks = [pipeline(*each, clipping) for each in enumerate(sizes) for clipping in _clippings(config)]
    return tuple(map(max, *peaks)) if len(peaks) > 1 else tuple(peaks[0])


@dataclass(frozen=True)
class _Clipping:
    """By what factors gradients are clipped: by the norm of a rank's own, which it knows first, and by that of all."""

    own: float
    of_all: float

    def steer(self, update: Update) -> None:
        """Let an update judge so: norms are made up, and whether a step is taken back hangs on them."""
        own, of_all = update.own_verdict, update.verdict
        update.own_verdict = lambda: replace(own(), factor=self.own)  # type: ignore[method-assign]
        update.verdict = lambda: replace(of_all(), factor=self.of_all)  # type: ignore[method-assign]


def _clippings(config: RunConfig) -> tuple[_Clipping | None, ...]:
    """With what factors a run is played: all that matter where a rank steps before it knows the norm of all."""
    if not config.schedule.post_validation or config.trainer.grad_clip_norm is None:
        return (None,)
    return _Clipping(1.0, 1.0), _Clipping(1.0, 0.5), _Clipping(0.5, 0.5)


class _PlayedRank:
    """Plays one rank, in a thread of its own.

    Args:
        config, plan: the run's.
        models: the model of each rank.
        tensors: the mode in which the model was made.
        batch: the samples of a step of one replica, real, and how many there are.
        clipping: see :func:`_clippings`.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        models: Mapping[int, LoadedModel],
        tensors: PlayedTensors,
        batch: Any,
        samples: int,
        clipping: _Clipping | None,
    ) -> None:
        self._config, self._plan, self._models, self._clipping = config, plan, models, clipping
        self._tensors, self._batch, self._samples = tensors, batch, samples

    def __call__(self, transport: PretendedTransport) -> int:
        with self._tensors, RealSizes():
            return self._peak(transport)

    def _peak(self, transport: PretendedTransport) -> int:
        config, plan = self._config, self._plan
        strategy = make_strategy(config, plan, sizes_vary=False)
        strategy.options = replace(strategy.options, **_AT_ONCE)
        strategy.cluster_environment = _Place(transport.rank, plan.topology.world_size)
        module = trainable(self._models[transport.rank], strategy, config)
        strategy.build(module, transport)
        made = module.configure_optimizers()
        strategy.optimizers = [made["optimizer"] if isinstance(made, dict) else made]
        strategy.attach(module)
        strategy.watch_states()
        engine, meter = strategy.engine, strategy.meter
        assert engine is not None
        assert meter is not None
        if self._clipping is not None:
            self._clipping.steer(engine.update)
        if config.trainer.ema_decay is not None:
            meter.hold(sum(4 * each.numel() for each in module.parameters() if each.requires_grad))
        while meter.will_track:
            strategy.hand_over(self._step(strategy.stages))
            strategy.optimizer_step(strategy.optimizers[0], lambda: None)
        if config.checkpoint.asynchronous:
            meter.hold_copies(self._saved_bytes(strategy))
        return meter.peak_bytes

    def _saved_bytes(self, strategy: EngineStrategy) -> int:
        """The bytes of what this rank copies, to save it in the background while the run goes on."""
        engine = strategy.engine
        assert engine is not None
        with strategy.in_parts(lambda content: None):
            saved = [strategy.lightning_module_state_dict(), strategy.optimizer_state(strategy.optimizers[0])]
            if self._config.trainer.ema_decay is not None:
                trained = {name: each for name, each in engine.saved_parameters.items() if each.requires_grad}
                averages = {name: torch.empty_like(each, dtype=torch.float32) for name, each in trained.items()}
                saved.append(strategy.saved_here(averages))
        return num_bytes(saved)

    def _step(self, stages: tuple[int, ...]) -> StepBatch:
        inputs, targets = (map_tensors(self._tensors.like, each) for each in self._batch)
        first, last = 0 in stages, self._plan.schedule.stages - 1 in stages
        return StepBatch(inputs if first else None, targets if last else None, self._samples)


def _copy(model: LoadedModel) -> LoadedModel:
    """A rank's own copy of a model, with the layers that it shares."""
    given = [layer.given for layer in model.layers]
    module, step, made, loss, given = copy.deepcopy((model.module, model.step, model.made, model.loss, given))
    layers = [
        layer if own is None else replace(layer, given=own, build=partial(_same, own), step=layer.step and step)
        for layer, own in zip(model.layers, given, strict=True)
    ]
    return replace(model, layers=layers, module=module, step=step, made=made, loss=loss)


def _same(module: nn.Module) -> nn.Module:
    return module


class _Place(LightningEnvironment):
    """The place of a rank that is played."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.set_global_rank(rank)
        self.set_world_size(world_size)
