"""Brings what DeepSpeed swapped to a drive into the host's memory and puts it back, to save it and to load it.

DeepSpeed reads and writes one weight's state at a time, and reads a whole partition for each. Here each partition is
read once, and written once if it was changed. Meanwhile the rank needs the host memory of its partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.strategy.zero.stage import DeepSpeedStage

__all__ = ["refresh_masters", "states_in_memory"]


@contextmanager
def states_in_memory(sharding: DeepSpeedStage, *, write: bool = False) -> Iterator[None]:
    """Within the block, no partition of this rank is on a drive, and DeepSpeed treats all as offloaded to the host.

    Args:
        write: whether weights and states may be changed in the block; if it ends well, the files get them.
    """
    outer = sharding.optimizer
    swapper: Any = getattr(outer, "optimizer_swapper", None)
    swapped = [] if swapper is None else _swapped_partitions(outer)
    for flat in swapped:
        _fetch(swapper, flat)
    outer.swap_optimizer = False
    done = False
    try:
        yield
        done = True
    finally:
        outer.swap_optimizer = swapper is not None
        for flat in swapped:
            if done and write:
                _store(outer, flat)
            else:
                swapper.swap_params_info[swapper.parameter_id(flat)].release_memory()


@torch.no_grad()
def refresh_masters(sharding: DeepSpeedStage) -> None:
    """Copy ZeRO 3's weights into the partitions that the optimizer updates. Needs :func:`states_in_memory`."""
    outer = sharding.optimizer
    pairs = zip(outer.fp16_partitioned_groups_flat, outer.fp32_partitioned_groups_flat, strict=True)
    for index, (weights, masters) in enumerate(pairs):
        if weights is None:  # on the drive themselves
            outer._swap_in_sub_group_to_flat_buffer(masters.data, index)
        else:
            masters.data.copy_(weights.data)


def _swapped_partitions(outer: Any) -> list[Tensor]:
    flats = outer.fp32_partitioned_groups_flat
    return [flat for index, flat in enumerate(flats) if outer._swappable_optimizer_subgroup(index)]


def _fetch(swapper: Any, flat: Tensor) -> None:
    swapper.swap_in_optimizer_state(flat, None)
    tensors = swapper.swap_params_info[swapper.parameter_id(flat)].get_compute_tensors()
    copies = [tensor.data.clone() for tensor in tensors]  # the swapper's own buffers hold one partition only
    swapper.release_swap_buffers(flat)
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.data = copy


def _store(outer: Any, flat: Tensor) -> None:
    """Write a partition and its states, which may be other tensors than those that were read."""
    swapper = outer.optimizer_swapper
    info = swapper.swap_params_info[swapper.parameter_id(flat)]
    weights = flat.data
    states = outer.optimizer.state.pop(flat, None)
    info.tensors, info.has_state_tensors = info.tensors[:1], False
    swapper.swap_in_optimizer_state(flat, None)  # the swapper writes only what it has read
    flat.data.copy_(weights)
    if states is not None:
        outer.optimizer.state[flat] = states
    swapper.swap_out_optimizer_state(flat, False)
