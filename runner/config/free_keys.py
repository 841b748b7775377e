"""``parallelism.free``: which keys ``parallelism=auto`` may change."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["FREE_NAMES", "freed_keys", "held_keys"]

_KEYS = {
    "pipeline": ("parallelism.pipeline",),
    "data": ("parallelism.data",),
    "tensor": ("parallelism.tensor",),
    "schedule": ("schedule", "schedule.chunks"),
    "microbatches": ("schedule.microbatches",),
    "partition": ("partition", "partition.boundaries"),
    "activation_checkpoint": ("activation_checkpoint", "activation_checkpoint.layers"),
    "zero": ("zero.stage",),
    "offload": ("offload", "offload.activations", "offload.optimizer"),
}
_WHOLE = {keys[0]: keys for keys in _KEYS.values()}

FREE_NAMES = tuple(dict.fromkeys((*_KEYS, *_WHOLE)))
"""What ``parallelism.free`` may name: short names, and the keys themselves."""


def freed_keys(free: Sequence[str] | None) -> set[str]:
    """The keys that the search may set; null: all that it knows."""
    names = _KEYS if free is None else free
    return {key for name in names for key in _KEYS.get(name) or _WHOLE[name]}


def held_keys(free: Sequence[str] | None) -> Collection[str]:
    """The keys that stay as the request has them."""
    return freed_keys(None) - freed_keys(free)
