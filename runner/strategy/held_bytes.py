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

__all__ = ["at_home", "held_bytes", "new_bytes", "states", "states_of", "unwrapped", "weights_of"]


def held_bytes(engine: Engine, optimizer: Optimizer) -> dict[str, int]:
    """Bytes between steps: ``weights``, ``gradients`` and ``optimizer`` on the device, and ``host`` for offloaded ones.

    Gradients are counted between two backwards, or before they are reduced, when they are largest.
    """
    optimizer, seen = unwrapped(optimizer), set[int]()
    weights = new_bytes(weights_of(engine), seen)
    host = new_bytes(at_home(engine, optimizer), seen)
    gradients_at_home = sum(gradients.num_bytes_at_home for gradients in engine.all_gradients)
    return {
        "weights": weights,
        "gradients": sum(gradients.num_bytes for gradients in engine.all_gradients) - gradients_at_home,
        "optimizer": new_bytes(states(engine, optimizer), seen),
        "host": host + gradients_at_home,
    }


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer in Lightning's wrapper, or itself."""
    inner: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner


def weights_of(engine: Engine) -> list[Tensor]:
    """Parameters and buffers of the stages, and the versions and changes of weights that are held beside them."""
    modules = engine.stages.values()
    weights = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    for store in engine.stores.values():
        weights += store.held
    for exchange in engine.waves.values():
        weights += exchange.held
    return weights


def at_home(engine: Engine, optimizer: Optimizer) -> list[Tensor]:
    """Weights that are at home in the host's memory, and the optimizer's states of them."""
    home = engine.swap.parameters if engine.swap is not None else []
    return [*home, *states_of(optimizer, [each for each in home if each.requires_grad])]


def states(engine: Engine, optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer and the sums of gradients keep from step to step."""
    kept = [gradients.reducer.state_dict().values() for gradients in engine.all_gradients]
    return [*_states(optimizer), *(tensor for each in kept for entries in each for tensor in entries.values())]


def _states(optimizer: Optimizer) -> Iterable[Tensor]:
    """The tensors of the optimizer's states, without step counters, which have no axis."""
    yield from states_of(optimizer, optimizer.state)
    onebit = compressing(optimizer)
    if onebit is not None:
        yield from (onebit.compression.worker_error, onebit.compression.server_error)
    watch = watch_of(optimizer)
    if watch is not None:
        yield from watch.held
    if isinstance(optimizer, MasterWeights):
        yield from (tensor for group in optimizer.inner.param_groups for tensor in group["params"])


def states_of(optimizer: Optimizer, weights: Iterable[Tensor]) -> Iterable[Tensor]:
    """The tensors of the optimizer's states of some weights, without step counters."""
    for weight in weights:
        entries = optimizer.state[weight].items()
        kept = (value for key, value in entries if key not in DELAYED)  # copies that are updated are no states
        yield from (value for value in kept if isinstance(value, Tensor) and value.dim())


def new_bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the storages that are not in ``seen`` yet; adds them to ``seen``."""
    total = 0
    for tensor in dense_parts(each for each in tensors if isinstance(each, Tensor)):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
