"""Checkpoints of all ranks' stages: whole, by global parameter names, whatever the layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from runner.engine.engine import Engine
from runner.errors import raise_problems
from runner.optim.master import MasterWeights
from runner.strategy.checkpoint_file import read_checkpoint, write_checkpoint
from runner.strategy.collectives import CollectiveStrategy
from runner.strategy.compressed import gathered_errors, load_errors, own_errors
from runner.strategy.state import (
    gather_optimizer_state,
    load_buffers,
    load_optimizer_state,
    own_buffers,
    own_optimizer_state,
    tensor_problems,
)

__all__ = ["WholeCheckpointStrategy"]

_REPLICA_BUFFERS = "replica_buffers"
"""Key of the buffers of the replicas after the first, by replica and global name: each has seen other samples."""

_ERRORS = "compression_errors"
"""Key, in an optimizer's state, of what a 1-bit optimizer left over."""


class WholeCheckpointStrategy(CollectiveStrategy):
    """Gathers the engine's stages to rank 0, and gives each rank its part back."""

    engine: Engine | None

    @property
    @abstractmethod
    def replica(self) -> int:
        """This rank's place on the data axis."""

    def whole_weights(self) -> AbstractContextManager[object]:
        """Within it, every rank's weights are whole and final; a collective of the stage's replicas."""
        assert self.engine is not None
        self.engine.settle()
        return nullcontext()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's weights by global name, on rank 0; empty elsewhere."""
        assert self.engine is not None
        self.engine.settle()
        own: dict[str, Tensor] = {}
        if self.replica == 0:
            for module in self.engine.first_copies.values():
                own.update({name: value.detach().cpu() for name, value in module.global_state().items()})
        parts = self.gather_objects(own)
        return {name: value for part in parts or [] for name, value in part.items()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole model's optimizer state by global parameter name, on rank 0; empty elsewhere."""
        assert self.engine is not None
        self.engine.settle()
        state = gather_optimizer_state(self.gather_objects(self._own_optimizer_state(optimizer)))
        parts = self.gather_objects(own_errors(optimizer, self.engine.stages, self.replica))
        errors = gathered_errors(parts or [])
        state |= {_ERRORS: errors} if errors else {}
        scale = self.engine.update.scale
        return state | {"loss_scale": scale.state_dict()} if state and scale.is_dynamic else state

    def _own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Of this rank's stages, where it is the one that tells; every rank calls this."""
        assert self.engine is not None
        return own_optimizer_state(optimizer, self.engine.first_copies) if self.replica == 0 else None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Rank 0 writes the file, whole or not at all; every rank calls this."""
        buffers = self._replica_buffers()
        if self.is_global_zero:
            write_checkpoint(checkpoint | ({_REPLICA_BUFFERS: buffers} if buffers else {}), Path(filepath))

    def _replica_buffers(self) -> dict[int, dict[str, Tensor]]:
        """By replica after the first, on rank 0; empty elsewhere."""
        assert self.engine is not None
        own = own_buffers(self.engine.first_copies) if self.replica else {}
        found: dict[int, dict[str, Tensor]] = {}
        for replica, buffers in self.gather_objects((self.replica, own)) or []:
            if buffers:
                found.setdefault(replica, {}).update(buffers)
        return found

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The file's tensors and plain values; it runs no code, whatever ``weights_only`` says."""
        return read_checkpoint(Path(checkpoint_path))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's tensors.

        Raises:
            RequestError: on every rank, where names or shapes are not the model's.
        """
        assert self.engine is not None
        own = {name: tensor for module in self.engine.stages.values() for name, tensor in module.global_state().items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        whole = {name: shape for part in self.all_gather_objects(shapes) for name, shape in part.items()}
        raise_problems(tensor_problems(whole, checkpoint["state_dict"]))
        for module in self.engine.stages.values():
            module.load_global_state(checkpoint["state_dict"])
        load_buffers(self.engine.stages, checkpoint.get(_REPLICA_BUFFERS, {}).get(self.replica, {}))
        for optimizer in self.optimizers:
            if isinstance(optimizer, MasterWeights):
                optimizer.reset_masters()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.engine is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._load_optimizer_state(optimizer, state)
            load_errors(optimizer, self.engine.stages, self.replica, state.get(_ERRORS, {}))
            if "loss_scale" in state:
                self.engine.update.scale.load_state_dict(state["loss_scale"])

    def _load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Put this rank's part of a whole state into its optimizer."""
        assert self.engine is not None
        load_optimizer_state(optimizer, self.engine.stages, state)
