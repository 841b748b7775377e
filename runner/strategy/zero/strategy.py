"""The engine with ZeRO between the replicas of each stage: DeepSpeed shards gradients, optimizer states and weights.

It is an :class:`runner.strategy.pipeline.EngineStrategy` that hands its single stage to a
:class:`runner.strategy.zero.stage.DeepSpeedStage`. Losses, micro-batches, clipping, learning rates, precision and
records are the runner's, as without ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from runner.engine.memory_meter import MemoryMeter
from runner.engine.options import EngineOptions
from runner.engine.update.gradients import StageGradients
from runner.engine.update.sharding import KeptElsewhere, Sharding
from runner.errors import Problem, RequestError
from runner.model.layers import StageModule
from runner.model.tags import ParameterTag
from runner.model.ties import Tie, crossing_ties
from runner.optim.states.delayed import DelayedUpdate
from runner.optim.states.settings import settings_of
from runner.strategy.own_clipping import refusing_norms_of_a_part
from runner.strategy.pipeline import EngineStrategy, Layout
from runner.strategy.whole_tensors import cut
from runner.strategy.zero.flat_state import FLAT, has_blocks, load_flat_states, own_flat_states, place_key
from runner.strategy.zero.held import held_by_deepspeed
from runner.strategy.zero.host_moves import measure_moves
from runner.strategy.zero.stage import STAGE_3, DeepSpeedGradients, DeepSpeedStage, StageGroups, start_deepspeed
from runner.strategy.zero.state import gathered_weights, load_states, whole_states
from runner.strategy.zero.swapped_states import refresh_masters, states_in_memory
from runner.strategy.zero.traffic import Traffic

__all__ = ["ZeroEngineStrategy"]


class ZeroEngineStrategy(EngineStrategy):
    """ZeRO 1, 2 or 3; or stage 0, in which DeepSpeed reduces gradients and nothing is sharded.

    Args:
        plan, options, device, timeout_seconds: the same as for every layout, with one stage per rank.
        settings: DeepSpeed's configuration (:func:`runner.config.deepspeed.deepspeed_settings`); if it is known only
            later, set the attribute before :meth:`setup`.
    """

    strategy_name = "runner_zero"

    def __init__(
        self,
        plan: Layout,
        options: EngineOptions,
        settings: Mapping[str, Any] | None = None,
        *,
        device: str = "cpu",
        **more: Any,
    ) -> None:
        super().__init__(plan, options, device=device, **more)
        self.settings: Mapping[str, Any] = settings or {}
        self.sharding: DeepSpeedStage | None = None
        self._attached = False
        self._traffic = Traffic()

    @property
    def _stage(self) -> int:
        stage: int = self.settings["zero_optimization"]["stage"]
        return stage

    @override
    def _sharding_of(self, stages: Mapping[int, StageModule]) -> Sharding | None:
        if self._stage == 0:
            return None
        crossing = crossing_ties(self._ties(), self.plan.partition)
        if crossing:
            why = (
                f"{crossing[0].name} is on several stages, and each stage's DeepSpeed engine would update its own copy"
            )
            rule = "must be null for weights that stages share"
            raise RequestError([Problem("zero.stage", self._stage, rule, why, "zero.stage=null")])
        (stage,) = stages.values()
        replicas, first = len(self.view.replicas), self.view.is_first_shard
        self.sharding = DeepSpeedStage(stage, self.settings, replicas, is_first_shard=first)
        return self.sharding

    def _ties(self) -> Sequence[Tie]:
        module: Any = self.lightning_module
        ties: Sequence[Tie] = module.ties
        return ties

    @override
    def _gradients_of(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], tag: ParameterTag | None
    ) -> StageGradients:
        return DeepSpeedGradients(parameters, tag) if self._stage == 0 else KeptElsewhere(parameters, tag)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and not self._attached:
            self._attach()
            self._attached = True

    def _attach(self) -> None:
        """Hand the rank's stage over to DeepSpeed, and measure its memory from now on."""
        assert self.engine is not None
        deepspeed = start_deepspeed(self.root_device, self.settings, self.local_rank)
        self._traffic.watch(deepspeed.comm.comm.cdb)
        groups = self._groups()
        if self.sharding is not None:
            self.sharding.attach(deepspeed, self.optimizers[0], groups)
            measure_moves(self.sharding.optimizer, self._moving)
            held = self.sharding.tensors()
            self.meter = MemoryMeter(self.engine, () if self.sharding.is_swapped else held)
            self.meter.watch(held if self.sharding.is_swapped else ())  # some are freed when they are first swapped
            return
        for stage, module in self.engine.stages.items():
            gradients = self.engine.gradients[stage]
            assert isinstance(gradients, DeepSpeedGradients)
            gradients.attach(deepspeed, module, self.optimizers[0], self.settings, groups)

    def _groups(self) -> StageGroups | None:
        topology = self.plan.topology
        models = [topology.model_group(replica) for replica in range(topology.num_replicas)]
        if len(models[0]) == 1:
            return None
        positions, shards = range(topology.num_positions), range(topology.num_shards)
        replicas = [topology.data_group(position, shard) for position in positions for shard in shards]
        return StageGroups(replicas, models, self._timeout)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        assert self.meter is not None
        with self._traffic.step(settled=self.meter.will_track):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def bytes_to_replicas(self, steps: int) -> dict[str, float]:
        momentum = self.exchange.bytes_sent if self.exchange is not None else 0  # sent by the runner, not by DeepSpeed
        return self._traffic.per_step() | {"optimizer_states": momentum / steps}

    @override
    def _clipping_refused(self, owner: object) -> AbstractContextManager[None]:
        if self.sharding is None:
            return super()._clipping_refused(owner)
        return refusing_norms_of_a_part(type(owner).__name__, divided=True)

    @override
    def _step_optimizer(self) -> None:
        if self.sharding is None:
            super()._step_optimizer()
        else:
            self.sharding.step()

    @override
    def held_bytes(self) -> dict[str, int]:
        if self.sharding is None:
            return super().held_bytes()
        assert self.engine is not None
        return held_by_deepspeed(self.engine, self.optimizers[0], self.sharding)

    # Checkpoints have the same form as without ZeRO

    @override
    def whole_weights(self) -> AbstractContextManager[object]:
        if self.sharding is None or not self._attached:
            return super().whole_weights()
        return gathered_weights(self.sharding)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.whole_weights():
            whole = super().lightning_module_state_dict()
            return {name: value.clone() for name, value in whole.items()}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.sharding is None or not self._attached:
            super().load_model_state_dict(checkpoint, strict)
            return
        with gathered_weights(self.sharding, write=True):
            super().load_model_state_dict(checkpoint, strict)
        if self._stage < STAGE_3:
            self.sharding.optimizer.refresh_fp32_params()
            return
        with states_in_memory(self.sharding, write=True):
            refresh_masters(self.sharding)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.sharding is None:
            return super().optimizer_state(optimizer)
        assert self.engine is not None
        if isinstance(optimizer, DelayedUpdate):
            optimizer.settle()
        with states_in_memory(self.sharding):
            if has_blocks(self.sharding):
                return self._flat_state()
            state = self.saved_optimizer_state(whole_states(self.sharding, masters=self._masters))
        scale = self.engine.update.scale
        return state | {"loss_scale": scale.state_dict()} if state and scale.is_dynamic else state

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.sharding is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.engine is not None
        (state,) = checkpoint["optimizer_states"]
        with states_in_memory(self.sharding, write=True):
            if FLAT in state:
                load_flat_states(self.sharding, state[FLAT], state["param_groups"], self._place)
                return
            own = {name: entries for name, entries in state["state"].items() if name in self.engine.tags}
            load_states(self.sharding, {**state, "state": cut(own, self.engine)})
        if "loss_scale" in state:
            self.engine.update.scale.load_state_dict(state["loss_scale"])

    def _flat_state(self) -> dict[str, Any]:
        """The state of all ranks on rank 0, empty on other ranks. In parts, this rank's state."""
        assert self.sharding is not None
        parts = self.saved_parts((self._place, own_flat_states(self.sharding)))
        if parts is None:
            return {}
        settings = settings_of(self.sharding.optimizer.optimizer)
        return {"state": {}, "param_groups": settings, FLAT: dict(parts)}

    @property
    def _place(self) -> str:
        assert self.sharding is not None
        return place_key(self.sharding, self.view.position, self.replica)

    @property
    def _masters(self) -> bool:
        """Whether the weights have 16 bits and fp32 masters."""
        settings = self.settings
        own = settings.get("bf16", {}).get("bf16_master_weights_and_grads", False)
        return any(settings.get(key, {}).get("enabled", False) for key in ("bf16", "fp16")) and not own
