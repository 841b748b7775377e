"""Counts the bytes of weights, gradients and optimizer states on a rank from live tensors, each storage once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from runner.engine.engine import Engine
from runner.engine.works.watch import watch_of
from runner.model.dense_parts import dense_parts
from runner.optim.states.delayed import DELAYED
from runner.optim.states.master import MasterWeights
from runner.strategy.compressed import compressing
from runner.strategy.zero.stage import DeepSpeedStage

__all__ = ["held_bytes"]


def held_bytes(engine: Engine, optimizer: Optimizer, sharding: DeepSpeedStage | None) -> dict[str, int]:
    """Bytes between steps: ``weights``, ``gradients`` and ``optimizer`` on the device, and ``host`` for offloaded ones.

    Gradients are counted between two backwards, or before they are reduced, when they are largest.
    """
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
    seen: set[int] = set()
    modules = list(engine.stages.values())
    weights = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    for store in engine.stores.values():
        weights += store.held
    for exchange in engine.waves.values():
        weights += exchange.held
    shards: list[Tensor] = []
    if sharding is not None:
        shards = [shard for parameter in sharding.module.parameters() if (shard := _shard(parameter)) is not None]
    if sharding is None or "offload_param" not in sharding.settings["zero_optimization"]:
        weights += shards
    home = engine.swap.parameters if engine.swap is not None else []
    at_home = _new_bytes([*home, *_states_of(optimizer, [each for each in home if each.requires_grad])], seen)
    found = {"weights": _new_bytes(weights, seen), "gradients": 0, "optimizer": 0, "host": at_home}
    kept = [gradients.reducer.state_dict().values() for gradients in engine.all_gradients]
    states = [*_states(optimizer), *(tensor for each in kept for entries in each for tensor in entries.values())]
    if sharding is None:
        gradients_at_home = sum(gradients.num_bytes_at_home for gradients in engine.all_gradients)
        found["host"] += gradients_at_home
        found["gradients"] = sum(gradients.num_bytes for gradients in engine.all_gradients) - gradients_at_home
        found["optimizer"] = _new_bytes(states, seen)
        return found
    _new_bytes(sharding.bucket_tensors(), seen)
    offloaded = sharding.settings["zero_optimization"].get("offload_optimizer") is not None
    if offloaded:
        if sharding.twin is not None:
            flats = sharding.twin.flats()
            found["gradients"] = _new_bytes([flat.grad for flat in flats], seen)
            found["optimizer"] = _new_bytes([*flats, *_states_of(optimizer, flats)], seen)
        coming = getattr(sharding.optimizer, "accumulated_grads_in_cpu", {}).values()
        found["host"] = _new_bytes([*shards, *sharding.tensors(), *states, *coming], seen)
        return found
    found["host"] = _new_bytes(shards, seen)  # if only the weights are offloaded
    found["gradients"] = sharding.most_gradient_bytes
    _new_bytes(sharding.gradient_tensors(), seen)
    found["optimizer"] = _new_bytes([*sharding.tensors(), *states], seen)
    return found


def _states(optimizer: Optimizer) -> Iterable[Tensor]:
    """The tensors of the optimizer's states, without step counters, which have no axis."""
    yield from _states_of(optimizer, optimizer.state)
    onebit = compressing(optimizer)
    if onebit is not None:
        yield from (onebit.compression.worker_error, onebit.compression.server_error)
    watch = watch_of(optimizer)
    if watch is not None:
        yield from watch.held
    if isinstance(optimizer, MasterWeights):
        yield from (tensor for group in optimizer.inner.param_groups for tensor in group["params"])


def _states_of(optimizer: Optimizer, weights: Iterable[Tensor]) -> Iterable[Tensor]:
    for weight in weights:
        entries = optimizer.state[weight].items()
        kept = (value for key, value in entries if key not in DELAYED)  # copies that are updated are no states
        yield from (value for value in kept if isinstance(value, Tensor) and value.dim())


def _shard(parameter: Any) -> Tensor | None:
    return getattr(parameter, "ds_tensor", None)


def _new_bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the storages that are not in ``seen`` yet; adds them to ``seen``."""
    total = 0
    for tensor in dense_parts(each for each in tensors if isinstance(each, Tensor)):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
