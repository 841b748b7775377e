"""Checkpoints by global parameter names, independent of the layout: in one file, or in parts.

A checkpoint in one file is gathered on rank 0. In parts, each rank writes its own: the replicas of a stage divide its
weights and states among them, each tensor as a whole, so that any layout finds what it needs by name.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from runner.checkpoint.file import read_checkpoint, write_checkpoint
from runner.checkpoint.parts import as_divided
from runner.checkpoint.plain import MISSING, Lost, Plain, as_plain
from runner.checkpoint.state import (
    GROWN,
    as_saved,
    gather_optimizer_state,
    load_buffers,
    load_optimizer_state,
    own_buffers,
    own_optimizer_state,
    tensor_problems,
)
from runner.engine.engine import Engine
from runner.errors import raise_problems
from runner.model.sharded.values import Shard
from runner.optim.catalogue.drift import DRIFT, DRIFT_KEY
from runner.optim.catalogue.motion import LAST_GRADIENT
from runner.optim.states.master import MasterWeights
from runner.strategy.collectives import CollectiveStrategy
from runner.strategy.compressed import OwnErrors, load_errors, own_errors
from runner.strategy.protocols import Layout
from runner.strategy.reducers import load_reducer_states, own_reducer_states
from runner.strategy.whole_tensors import cut, joined

__all__ = ["NamedCheckpointStrategy", "num_bytes"]

_REPLICA_BUFFERS = "replica_buffers"
_OLDER_VERSIONS = "older_weight_versions"
"""Key of the buffers of all replicas but the first, by replica and global name; each replica sees other samples."""

_ERRORS = "compression_errors"
"""Key in an optimizer's state: the compression errors of a 1-bit optimizer, by rank."""

_REDUCERS = "reducer_states"
"""Key, in an optimizer's state, of what reducers of gradients keep, by rank: see :mod:`runner.strategy.reducers`."""


Value = TypeVar("Value")

logger = logging.getLogger(__name__)


class NamedCheckpointStrategy(CollectiveStrategy):
    """Gathers the engine's stages on rank 0 or leaves each rank its part, and loads each rank's part again."""

    engine: Engine | None
    plan: Layout
    _write_part: Callable[[dict[str, Any]], None] | None = None
    _write: Callable[[Plain, Path], None] | None = None
    _lost: tuple[Lost, ...] = ()

    @property
    @abstractmethod
    def replica(self) -> int:
        """The number of this rank's replica, from 0."""

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """The number of replicas."""

    @contextmanager
    def in_parts(self, write: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Within the block, checkpoints are saved in parts.

        ``write`` receives this rank's part; its tensors are copies on the CPU.
        """
        self._write_part = write
        try:
            yield
        finally:
            self._write_part = None

    @contextmanager
    def written_by(self, write: Callable[[Plain, Path], None]) -> Iterator[None]:
        """Within the block, rank 0 hands checkpoints in one file to ``write`` instead of writing them."""
        self._write = write
        try:
            yield
        finally:
            self._write = None

    def saved_parts(self, own: Value) -> list[Value] | None:
        """In parts, a list of this rank's value; else every rank's value on rank 0, and None on other ranks."""
        return self.gather_objects(own) if self._write_part is None else [own]

    def saved_here(self, named: Mapping[str, Value]) -> dict[str, Value]:
        """The weights or states, among those that all replicas hold, that this rank saves.

        In parts, each goes to the replica that has the fewest bytes so far, and ranks that divide layers save the parts
        that they hold. Else the first replica saves all, and of ranks that divide layers the first one saves their
        weights, put together; all of them must call it.
        """
        assert self.engine is not None
        if self._write_part is None:
            return self._put_together(named) if self.replica == 0 else {}
        sizes = [0] * self.num_replicas
        own = {}
        tags = self.engine.tags
        for name, value in sorted(
            named.items(), key=lambda pair: tags[pair[0]].shard is None
        ):  # a group agrees on parts
            replica = sizes.index(min(sizes))
            sizes[replica] += num_bytes(value)
            if replica == self.replica:
                own[name] = value
        return self._put_together({name: own[name] for name in named if name in own})

    @property
    def _shards(self) -> dict[str, Shard]:
        """The part that this rank holds of each divided weight, by its global name."""
        assert self.engine is not None
        return {name: tag.shard for name, tag in self.engine.tags.items() if tag.shard is not None}

    def whole_weights(self) -> AbstractContextManager[object]:
        """Within the block, every rank's weights are complete and final; all replicas of a stage must call it."""
        assert self.engine is not None
        self.engine.settle()
        return nullcontext()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's weights by global name on rank 0, empty on other ranks. In parts, this rank's weights."""
        assert self.engine is not None
        self.engine.settle()
        copies, tags = self.engine.first_copies, self.engine.tags
        whole = {name: value.detach() for module in copies.values() for name, value in module.global_state().items()}
        buffers = own_buffers(copies)  # replicas have different buffers; those of the first belong to the model
        weights = {name: value for name, value in whole.items() if name not in buffers and tags[name].is_first_copy}
        own = self.saved_here(weights)
        own |= buffers if self.replica == 0 and self.engine.view.is_first_shard else {}
        parts = self.saved_parts({name: as_saved(own[name]) for name in whole if name in own})
        return {name: value for part in parts or [] for name, value in part.items()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole model's optimizer state by global parameter name on rank 0, empty on other ranks.

        In parts, this rank's state.
        """
        assert self.engine is not None
        self.engine.settle()
        state = self.saved_optimizer_state(self._own_optimizer_state(optimizer))
        own = own_errors(optimizer, self.engine.stages, self.replica)
        parts = self.saved_parts((self.global_rank, dict(vars(own)) if own is not None else None))
        errors = {rank: part for rank, part in parts or [] if part is not None}
        state |= {_ERRORS: errors} if errors else {}
        kept = self.saved_parts((self.global_rank, own_reducer_states(self.engine, self.replica)))
        reducers = {rank: part for rank, part in kept or [] if part is not None}
        state |= {_REDUCERS: reducers} if reducers else {}
        scale = self.engine.update.scale
        return state | {"loss_scale": scale.state_dict()} if state and scale.is_dynamic else state

    def _own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """The state of this rank's stages, if its replica saves, else None. Every rank must call it."""
        assert self.engine is not None
        return own_optimizer_state(optimizer, self.engine.saved_parameters) if self._saves else None

    @property
    def _saves(self) -> bool:
        return self._write_part is not None or self.replica == 0

    def saved_optimizer_state(self, own: Mapping[str, Any] | None) -> dict[str, Any]:
        """The whole model's state on rank 0, from states that all replicas hold. In parts, this rank's state."""
        kept = {**own, "state": self.saved_here(own["state"])} if own is not None and self._saves else None
        return gather_optimizer_state(self.saved_parts(kept))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Rank 0 writes the file atomically; every rank must call it.

        What no file can hold is left out, named in the log and in the file; the rest is saved.
        """
        buffers, versions = self._replica_buffers(), self._older_versions()
        if self._lost:
            checkpoint[MISSING] = {one.place: one.why for one in self._lost}
        content = checkpoint | ({_REPLICA_BUFFERS: buffers} if buffers else {})
        content |= {_OLDER_VERSIONS: versions} if versions else {}
        content |= {GROWN: grown} if (grown := self._grown_buffers()) else {}
        if self._write_part is not None:
            found = as_plain(content, in_parts=True)
            self._lost += found.lost
            self._write_part(_own_tensors(as_divided(found.content, self._shards)))
        elif self.is_global_zero:
            found = as_plain(content)
            self._lost += found.lost
            if self._write is not None:
                self._write(found, Path(filepath))
            else:
                write_checkpoint(found.content, Path(filepath))
                self._tell_lost()

    def lose(self, lost: Lost) -> None:
        """Note what the next checkpoint will be without."""
        self._lost += (lost,)

    def take_lost(self) -> tuple[Lost, ...]:
        """What the last checkpoint is without, since the last call."""
        lost, self._lost = self._lost, ()
        return lost

    def _tell_lost(self) -> None:
        for one in self.take_lost():
            logger.warning("the checkpoint is without %s: %s", one.place, one.why)

    def _older_versions(self) -> dict[int, dict[str, Tensor]]:
        """The weights besides the newest that later steps read: by version, then by global name, on rank 0.

        In parts, this rank's. Replicas have the same ones.
        """
        assert self.engine is not None
        found: dict[int, dict[str, Tensor]] = {}
        own: list[dict[int, dict[str, Tensor]]] = []
        for store in self.engine.stores.values() if self.replica == 0 else ():
            own.append({version: self._put_together(weights) for version, weights in store.older().items()})
        for versions in self.saved_parts(own) or []:
            for part in versions:
                for version, weights in part.items():
                    found.setdefault(version, {}).update({name: value.cpu() for name, value in weights.items()})
        return found

    def _put_together(self, named: Mapping[str, Value]) -> dict[str, Value]:
        """Weights of this rank's stages, whole on the first of the ranks that divide layers. In parts, its parts."""
        assert self.engine is not None
        if self._write_part is None:
            return joined(named, self.engine)
        first = self.engine.view.is_first_shard
        return {name: value for name, value in named.items() if first or name in self._shards}

    def _grown_buffers(self) -> dict[str, tuple[int, ...]]:
        """The shapes of buffers that forwards have made or given another shape, on rank 0. In parts, this rank's."""
        assert self.engine is not None
        copies = self.engine.first_copies if self.engine.view.is_first_shard else {}
        own = [module.grown_buffers() for module in copies.values()]
        parts = [shapes for part in self.saved_parts(own) or [] for shapes in part]
        return {name: shape for shapes in parts for name, shape in shapes.items()}

    def _replica_buffers(self) -> dict[int, dict[str, Tensor]]:
        """The buffers of each replica but the first, on rank 0; empty on other ranks. In parts, this rank's buffers."""
        assert self.engine is not None
        own = own_buffers(self.engine.first_copies) if self.replica and self.engine.view.is_first_shard else {}
        found: dict[int, dict[str, Tensor]] = {}
        for replica, buffers in self.saved_parts((self.replica, own)) or []:
            if buffers:
                found.setdefault(replica, {}).update(buffers)
        return found

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The file's tensors and plain values; no code of the file runs, whatever ``weights_only`` says."""
        module = self.lightning_module
        assert module is not None
        hooks: list[Any] = [module, *module.trainer.callbacks]  # type: ignore[attr-defined]  # it is the Trainer's list
        users = [each for each in hooks if not type(each).__module__.startswith("runner.")]
        asked = any(is_overridden("on_load_checkpoint", each) for each in users)  # their code must find tensors
        return read_checkpoint(Path(checkpoint_path), divided=not asked)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's tensors.

        Raises:
            RequestError: names or shapes differ from the model's; it is raised on every rank.
        """
        assert self.engine is not None
        own = {name: tensor for module in self.engine.stages.values() for name, tensor in module.global_state().items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        shards = self._shards
        shapes |= {name: shards[name].whole for name in own if name in shards}
        whole = {name: shape for part in self.all_gather_objects(shapes) for name, shape in part.items()}
        saved = checkpoint["state_dict"]
        grown = {name: saved[name] for name in checkpoint.get(GROWN, ())}
        raise_problems(tensor_problems(whole, saved, grown))
        state = {**saved, **cut({name: saved[name] for name in own if name in saved}, self.engine)}
        for module in self.engine.stages.values():
            module.put_buffers(grown)
            module.load_global_state(state)
        load_buffers(self.engine.stages, checkpoint.get(_REPLICA_BUFFERS, {}).get(self.replica, {}))
        versions = {
            version: cut(weights, self.engine) for version, weights in checkpoint.get(_OLDER_VERSIONS, {}).items()
        }
        for store in self.engine.stores.values():
            store.load_older(checkpoint["global_step"], versions)
        for optimizer in self.optimizers:
            if isinstance(optimizer, MasterWeights):
                optimizer.reset_masters()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.engine is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._load_optimizer_state(optimizer, state)
            errors = [OwnErrors(**part) for part in state.get(_ERRORS, {}).values()]
            load_errors(optimizer, self.engine.stages, self.replica, errors)
            reducers = state.get(_REDUCERS, {}).values()
            load_reducer_states(self.engine, self.replica, self.num_replicas, reducers)
            if "loss_scale" in state:
                self.engine.update.scale.load_state_dict(state["loss_scale"])

    def _load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole state into its optimizer."""
        assert self.engine is not None
        left = {DRIFT_KEY, LAST_GRADIENT} - self._kept_for_predictions()
        own = {
            name: {key: value for key, value in entries.items() if key not in left}
            for name, entries in state["state"].items()
            if name in self.engine.tags
        }
        load_optimizer_state(optimizer, self.engine.stages, {**state, "state": cut(own, self.engine)})

    def _kept_for_predictions(self) -> set[str]:
        """The states that predictions of weights need here; a run that this one continues may have predicted."""
        prediction = self.plan.prediction
        if prediction is None or not prediction.values:
            return set()
        return {DRIFT_KEY if prediction.kind.name == DRIFT.name else LAST_GRADIENT}


def _own_tensors(value: Any) -> Any:
    """``value`` with its tensors copied to the CPU, so that training cannot change them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {key: _own_tensors(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_own_tensors(one) for one in value]
    return tuple(_own_tensors(one) for one in value) if isinstance(value, tuple) else value


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in ``value``, without step counters, which have no axis."""
    if isinstance(value, Tensor):
        return value.nbytes if value.dim() else 0
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(num_bytes(one) for one in parts)
