"""Counts what a rank holds on which DeepSpeed keeps the weights, gradients and states of its stage."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from runner.engine.engine import Engine
from runner.strategy.held_bytes import at_home, new_bytes, states, states_of, unwrapped, weights_of
from runner.strategy.zero.stage import DeepSpeedStage

__all__ = ["held_by_deepspeed"]


def held_by_deepspeed(engine: Engine, optimizer: Optimizer, sharding: DeepSpeedStage) -> dict[str, int]:
    """Bytes between steps, as :func:`runner.strategy.held_bytes.held_bytes` counts them."""
    optimizer, seen = unwrapped(optimizer), set[int]()
    weights = weights_of(engine)
    shards = [shard for parameter in sharding.module.parameters() if (shard := _shard(parameter)) is not None]
    if "offload_param" not in sharding.settings["zero_optimization"]:
        weights += shards
    found = {"weights": new_bytes(weights, seen), "gradients": 0, "optimizer": 0}
    new_bytes([*at_home(engine, optimizer), *sharding.bucket_tensors()], seen)
    if sharding.settings["zero_optimization"].get("offload_optimizer") is not None:
        if sharding.twin is not None:
            flats = sharding.twin.flats()
            found["gradients"] = new_bytes([flat.grad for flat in flats], seen)
            found["optimizer"] = new_bytes([*flats, *states_of(optimizer, flats)], seen)
        coming = getattr(sharding.optimizer, "accumulated_grads_in_cpu", {}).values()
        offloaded = [*shards, *sharding.tensors(), *states(engine, optimizer), *coming]
        return {**found, "host": new_bytes(offloaded, seen)}
    found["host"] = new_bytes(shards, seen)  # if only the weights are offloaded
    found["gradients"] = sharding.most_gradient_bytes
    new_bytes(sharding.gradient_tensors(), seen)
    found["optimizer"] = new_bytes([*sharding.tensors(), *states(engine, optimizer)], seen)
    return found


def _shard(parameter: Any) -> Tensor | None:
    return getattr(parameter, "ds_tensor", None)
