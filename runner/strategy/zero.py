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
from torch.optim import Optimizer
from typing_extensions import override

from runner.engine.engine import Engine
from runner.engine.memory_meter import MemoryMeter
from runner.engine.options import EngineOptions
from runner.engine.sharding import Sharding
from runner.model.layers import StageModule
from runner.strategy.deepspeed_stage import DeepSpeedStage, StageGroups, start_deepspeed
from runner.strategy.pipeline import Layout, PipelineStrategy
from runner.strategy.state import gather_optimizer_state
from runner.strategy.zero_state import gathered_weights, load_states, whole_states

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
        super().setup(trainer)
        assert self.sharding is not None
        if trainer.state.fn == TrainerFn.FITTING and self.sharding.engine is None:
            deepspeed = start_deepspeed(self.root_device, self.global_rank, self.local_rank)
            self.sharding.attach(deepspeed, self.optimizers[0], self._groups())
            assert self.engine is not None
            self.meter = MemoryMeter(self.engine, self.sharding.tensors())

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

    # Checkpoints: whole, as without ZeRO

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._is_shared_out:
            return super().lightning_module_state_dict()
        assert self.sharding is not None
        with gathered_weights(self.sharding):
            whole = super().lightning_module_state_dict()
            return {name: value.clone() for name, value in whole.items()}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._is_shared_out:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert self.sharding is not None
        with gathered_weights(self.sharding, write=True):
            super().load_model_state_dict(checkpoint, strict)
        self.sharding.optimizer.refresh_fp32_params()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.sharding is not None
        assert self.engine is not None
        own = whole_states(self.sharding, masters=self._masters)
        state = gather_optimizer_state(self.gather_objects(own if self.replica == 0 else None))
        scale = self.engine.update.scale
        return state | {"loss_scale": scale.state_dict()} if state and scale.is_dynamic else state

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.sharding is not None
        assert self.engine is not None
        (state,) = checkpoint["optimizer_states"]
        load_states(self.sharding, state)
        if "loss_scale" in state:
            self.engine.update.scale.load_state_dict(state["loss_scale"])

    @property
    def _is_shared_out(self) -> bool:
        return self.sharding is not None and self.sharding.engine is not None

    @property
    def _masters(self) -> bool:
        """Weights have 16 bits, and fp32 masters."""
        settings = self.settings
        own = settings.get("bf16", {}).get("bf16_master_weights_and_grads", False)
        return any(settings.get(key, {}).get("enabled", False) for key in ("bf16", "fp16")) and not own
