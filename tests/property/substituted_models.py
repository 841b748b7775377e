"""Layers that are written with more operators than they need. Plain PyTorch: it imports nothing of the runner."""

from __future__ import annotations

import math

import torch
from tensor_models import LENGTH, TOKENS, data, loss
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attending", "Gated", "Table", "Whole", "build", "data", "loss", "whole"]

WIDTH, HEADS = 16, 4


class Table(nn.Module):
    """Token ids [samples, tokens] to the rows of a table, which a product with rows of zeros and a one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.map = nn.Parameter(torch.randn(TOKENS, WIDTH) / 4), nn.Linear(TOKENS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        ones = functional.one_hot(ids, TOKENS).to(self.rows.dtype)
        made: Tensor = ones @ self.rows + self.map(ones)
        return made


class Attending(nn.Module):
    """Causal attention as it is written out, with dropout of a probability.

    Args:
        dropout: of the attention's probabilities and of what is added.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop, self.nothing = nn.Dropout(dropout), nn.Identity()
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH).tril(), persistent=False)
        self.seen: Tensor

    def forward(self, value: Tensor) -> Tensor:
        samples, tokens, _ = value.shape
        normed = self.norm(value)
        query, key, values = (
            layer(normed).view(samples, tokens, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(self.seen[:tokens, :tokens] == 0, float("-inf"))
        mixed = self.drop(scores.softmax(-1)) @ values
        joined = mixed.transpose(1, 2).transpose(1, 2).transpose(1, 2).reshape(samples, tokens, WIDTH)
        made: Tensor = value + self.nothing(self.drop(self.out(joined) * 1.0)) + 0
        return made


class Gated(nn.Module):
    """A gated feed-forward, whose gate is multiplied by two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm(value)
        gates = functional.silu(self.gate(normed) * 3.0 / 2.5)
        made: Tensor = value + self.down(gates * self.up(normed))
        return made


def build(dropout: float = 0.0) -> nn.Sequential:
    """A table, two blocks and a head."""
    blocks = [layer for _ in range(2) for layer in (Attending(dropout), Gated())]
    return nn.Sequential(Table(), *blocks, nn.Linear(WIDTH, TOKENS))


class Whole(nn.Module):
    """The same as one module, which lists no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = build()

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.inside(ids)
        return made


def whole() -> Whole:
    return Whole()
