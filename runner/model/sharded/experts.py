"""Mixtures of experts as transformers has them: two weights for all experts, gates and ups in one."""

from __future__ import annotations

from torch import nn

__all__ = ["CUTS", "are_experts", "why_not_experts"]

_MATRICES = 3
CUTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
"""The dimension that is divided of each weight, and in how many blocks its features lie: gates, then ups."""


def are_experts(module: nn.Module) -> bool:
    """Whether a module has nothing but a weight [experts, 2 hidden, width] and one [experts, width, hidden]."""
    weights = dict(module.named_parameters())
    if weights.keys() != CUTS.keys() or any(each.dim() != _MATRICES for each in weights.values()):
        return False
    (count, both, width), (others, out, hidden) = (whole_shape(weights[name]) for name in CUTS)
    return (count, both, width) == (others, 2 * hidden, out)


def whole_shape(weight: nn.Parameter) -> tuple[int, ...]:
    """The shape of a weight, also if it has been divided already."""
    shard = getattr(weight, "shard", None)
    return tuple(weight.shape) if shard is None else tuple(shard.whole)


def why_not_experts(module: nn.Module, degree: int) -> str | None:
    """Why experts cannot be divided among so many ranks, or None if they can."""
    if not are_experts(module):
        shapes = "gate_up_proj [experts, 2 hidden, width] and down_proj [experts, width, hidden]"
        return f"It is a {type(module).__name__}, and experts have two weights, {shapes}"
    hidden = whole_shape(dict(module.named_parameters())["down_proj"])[2]
    return f"Its {hidden} hidden features cannot be divided by {degree}" if hidden % degree else None
