"""The engine with ZeRO on each stage's data axis: gradients, optimizer states and weights shared out by DeepSpeed.

A :class:`runner.strategy.pipeline.PipelineStrategy` that hands its one stage to a
:class:`runner.strategy.deepspeed_stage.DeepSpeedStage`. Losses, micro-batches, clipping, learning rates, precision and
records are the runner's, as without ZeRO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from runner.engine.engine import Engine
from runner.engine.memory_meter import MemoryMeter
from runner.engine.options import EngineOptions
from runner.engine.sharding import Sharding
from runner.model.layers import StageModule
from runner.strategy.deepspeed_stage import DeepSpeedStage, StageGroups, start_deepspeed
from runner.strategy.pipeline import Layout, PipelineModule, PipelineStrategy

__all__ = ["ZeroStrategy"]


class ZeroStrategy(PipelineStrategy):
    """ZeRO 1, 2 or 3.

    Args:
        plan, options, device, timeout_seconds: as for every layout; one stage per rank.
        settings: DeepSpeed's configuration (:func:`runner.config.deepspeed.deepspeed_settings`).
    """

    strategy_name = "runner_zero"

    def __init__(
        self, plan: Layout, options: EngineOptions, settings: Mapping[str, Any], *, device: str = "cpu", **more: Any
    ) -> None:
        super().__init__(plan, options, device=device, **more)
        self.settings = settings
        self.sharding: DeepSpeedStage | None = None

    @override
    def _sharding_of(self, stages: Mapping[int, StageModule]) -> Sharding | None:
        (stage,) = stages.values()
        self.sharding = DeepSpeedStage(stage, self.settings, len(self.view.replicas))
        return self.sharding

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        first = self.engine is None
        super().setup(trainer)
        assert self.sharding is not None
        if trainer.state.fn == TrainerFn.FITTING and self.sharding.engine is None:
            deepspeed = start_deepspeed(self.root_device, self.global_rank, self.local_rank)
            self.sharding.attach(deepspeed, self.optimizers[0], self._groups())

    def _groups(self) -> StageGroups | None:
        topology = self.plan.topology
        pipelines = [topology.pipeline_group(replica) for replica in range(topology.num_replicas)]
        positions = range(len(pipelines[0]))
        if len(positions) == 1:
            return None
        return StageGroups([topology.data_group(position) for position in positions], pipelines)

    @override
    def _step_optimizer(self) -> None:
        assert self.sharding is not None
        self.sharding.step()
