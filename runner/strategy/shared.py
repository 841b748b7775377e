"""The engine with optimizer states sharded by the runner itself, for layouts that DeepSpeed's engine does not support.

It is an :class:`runner.strategy.pipeline.EngineStrategy` with any number of stages per rank and any kind of backward.
Gradients are summed as without ZeRO, so overflow check, norm and division are the engine's; only the update is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from runner.checkpoint.state import own_optimizer_state
from runner.engine.memory_meter import MemoryMeter
from runner.engine.update.replicas import ReplicaExchange
from runner.model.tags import named_parameters
from runner.optim.states.shared import SharedStates
from runner.strategy.pipeline import EngineStrategy
from runner.strategy.protocols import PipelineModule
from runner.strategy.whole_tensors import cut

__all__ = ["SharedStatesStrategy"]


class SharedStatesStrategy(EngineStrategy):
    """ZeRO stage 1 over each rank's stages."""

    strategy_name = "runner_shared_states"
    _shared: SharedStates

    @override
    def attach(self, module: PipelineModule) -> None:
        super().attach(module)
        assert self.engine is not None
        exchange = ReplicaExchange(self.engine.transport, self.view.replicas)
        self._shared = SharedStates(self.optimizers[0], exchange)
        self.meter = MemoryMeter(self.engine)  # the weights are in other storages now

    @override
    def _step_optimizer(self) -> None:
        self._shared.step()

    @override
    def bytes_to_replicas(self, steps: int) -> dict[str, float]:
        return super().bytes_to_replicas(steps) | {"weights": float(self._shared.gathered_bytes)}

    @override
    def _own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        assert self.engine is not None
        states = self._shared.whole()
        return own_optimizer_state(optimizer, self.engine.saved_parameters, states) if self._saves else None

    @override
    def _load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        assert self.engine is not None
        parameters = named_parameters(self.engine.stages)
        states = cut({name: each for name, each in state["state"].items() if name in self.engine.tags}, self.engine)
        own: dict[Tensor, Any] = {parameters[name]: states[name] for name in parameters if name in states}
        self._shared.load(own, state["param_groups"])
