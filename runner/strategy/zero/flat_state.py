"""Saves block-wise states of DeepSpeed's partitions as they are, because they cannot be separated by weight.

8-bit moments share one scale among 256 elements of a weight, and another layout might cut such a block. A checkpoint
with these states can be resumed in the layout that wrote it, and is refused in any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.errors import Problem, RequestError
from runner.optim.states.settings import apply_settings
from runner.strategy.zero.stage import DeepSpeedStage
from runner.strategy.zero.state import flat_weights

__all__ = ["FLAT", "has_blocks", "load_flat_states", "own_flat_states", "place_key"]

FLAT = "flat"
"""Key of such states in an optimizer's state: :func:`place_key` to one entry per partition."""


def has_blocks(sharding: DeepSpeedStage) -> bool:
    """Whether a state has another number of elements than its weight."""
    states = sharding.optimizer.optimizer.state
    flats = flat_weights(sharding)
    return any(
        isinstance(value, Tensor) and value.dim() > 0 and value.numel() != flat.numel()
        for flat in flats
        for value in states.get(flat, {}).values()
    )


def place_key(sharding: DeepSpeedStage, position: int, replica: int) -> str:
    """Identifies the rank to which states belong, and its layout."""
    return f"zero {sharding.stage}, stage {position}, replica {replica} of {sharding.replicas}"


def own_flat_states(sharding: DeepSpeedStage) -> list[dict[str, Any]]:
    """For every partition of this rank, its weights as they are updated and its states, on the CPU."""
    states = sharding.optimizer.optimizer.state
    return [
        {"weights": flat.detach().clone().cpu(), "state": {key: _kept(value) for key, value in states[flat].items()}}
        for flat in flat_weights(sharding)
    ]


@torch.no_grad()
def load_flat_states(
    sharding: DeepSpeedStage,
    saved: Mapping[str, Sequence[Mapping[str, Any]]],
    settings: Sequence[Mapping[str, Any]],
    key: str,
) -> None:
    """Load this rank's partitions.

    Raises:
        RequestError: the checkpoint was written in another layout.
    """
    if key not in saved:
        why = f"Its 8-bit states lie as they were shared out ({', '.join(sorted(saved))}); this is {key}"
        raise RequestError([Problem("resume", "checkpoint", "must be of this layout", why, "resume=null")])
    inner = sharding.optimizer.optimizer
    apply_settings(inner, settings)
    for flat, one in zip(flat_weights(sharding), saved[key], strict=True):
        flat.copy_(one["weights"])
        inner.state[flat] = {name: _kept(value, flat.device) for name, value in one["state"].items()}


def _kept(value: Any, device: torch.device | str = "cpu") -> Any:
    return value.detach().clone().to(device) if isinstance(value, Tensor) else value
