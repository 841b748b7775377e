"""Moves layers between stages while a run trains, after the steps that its plan names."""

from __future__ import annotations

import logging
import time
from itertools import chain, pairwise
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from runner.config.units import format_bytes, format_seconds
from runner.plan.values import RunPlan
from runner.strategy.migration import moves_between, require_movable
from runner.strategy.pipeline import EngineStrategy
from runner.training.callbacks import StepClock

__all__ = ["Migrations"]

logger = logging.getLogger(__name__)


class Migrations(Callback):
    """Gives each rank the layers of the plan's cut before the first step under it.

    Args:
        plan: the run's.
        clock: times the steps, without the moves, and writes what has moved into the record.
    """

    def __init__(self, plan: RunPlan, clock: StepClock) -> None:
        self._plan, self._clock = plan, clock

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Refuse what could not move, before the first step.

        Raises:
            RunFailedError: see :func:`runner.strategy.migration.require_movable`.
        """
        cuts = [cut.partition for _, cut in self._plan.cuts]
        moves = [moves_between(*pair, self._plan.schedule.placement[0]) for pair in pairwise(cuts)]
        strategy: Any = trainer.strategy
        require_movable(strategy.engine.stages.values(), chain(*moves))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        """Move the layers if the next step has another cut. What a resumed run has loaded is in its cut already."""
        strategy: Any = trainer.strategy
        after = self._plan.at(trainer.global_step)
        if strategy.plan.partition == after.partition:
            return
        assert isinstance(strategy, EngineStrategy)
        moves = moves_between(strategy.plan.partition, after.partition, after.schedule.placement[0])
        begun = time.perf_counter()
        moved = strategy.move_layers(pl_module, after)
        ranks = strategy.all_gather_objects((time.perf_counter() - begun, moved))
        seconds, num_bytes = max(seconds for seconds, _ in ranks), sum(sent for _, sent in ranks)
        layers = [list(move) for move in moves]
        self._clock.layers_moved = {"layers": layers, "bytes": num_bytes, "seconds": seconds}
        logger.info(
            "after step %d: %d layer%s moved, %s in %s",
            *(trainer.global_step, len(moves), "s" if len(moves) != 1 else ""),
            *(format_bytes(num_bytes), format_seconds(seconds)),
        )
        self._clock.start()
