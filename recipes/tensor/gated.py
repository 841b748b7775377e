"""A small decoder as many models are written today: RMS norms and a gated feed-forward layer. Plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["build"]


class Norm(nn.Module):
    """Divides by the root mean square of the features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        return self.weight * (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Causal attention and a gated feed-forward layer; [samples, tokens, width] in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.feed_norm = Norm(width), Norm(width)
        self.three, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        parts = self.three(self.norm(value)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        value = value + self.out(mixed.transpose(1, 2).flatten(2))
        fed = self.feed_norm(value)
        made: Tensor = value + self.down(functional.silu(self.gate(fed)) * self.up(fed))
        return made


def build(vocab_size: int, width: int, layers: int, heads: int, **_: Any) -> nn.Sequential:
    """The decoder: token ids [samples, tokens] to logits [samples, tokens, vocab_size]."""
    blocks = (Block(width, heads) for _ in range(layers))
    return nn.Sequential(nn.Embedding(vocab_size, width), *blocks, nn.Linear(width, vocab_size, bias=False))
