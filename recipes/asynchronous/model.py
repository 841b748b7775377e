"""A small decoder-only transformer as a list of blocks, and walks of a random Markov chain that it learns."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Batches", "entropy", "make_blocks"]

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 16, 32, 4
_SUCCESSORS = 4


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [samples, length] to [samples, length, width]."""
        embedded: Tensor = self.tokens(tokens) + self.positions
        return embedded


class _Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        parts = self.mixed(self.first(x)).view(samples, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        mapped: Tensor = self.narrow(functional.gelu(self.wide(self.second(x))))
        return x + mapped


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        words: Tensor = self.words(self.norm(x))
        return words


def make_blocks(depth: int, seed: int) -> nn.Sequential:
    """``depth`` parts with one transformer block each; the first also embeds tokens, the last also predicts them."""
    torch.manual_seed(seed)
    parts: list[list[nn.Module]] = [[_Block()] for _ in range(depth)]
    parts[0].insert(0, _Embedding())
    parts[-1].append(_Head())
    return nn.Sequential(*(nn.Sequential(*part) for part in parts))


class Batches:
    """Walks of a chain in which each token has four successors, the first of which is the most probable.

    Args:
        samples: walks per batch.
        seed: seed of the walks; the chain is always the same.
    """

    def __init__(self, samples: int, seed: int) -> None:
        chain = torch.Generator().manual_seed(0)
        self._successors = torch.stack([torch.randperm(VOCABULARY, generator=chain) for _ in range(VOCABULARY)])
        self._samples, self._generator = samples, torch.Generator().manual_seed(1000 + seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            walk = [torch.randint(VOCABULARY, (self._samples,), generator=self._generator)]
            for _ in range(LENGTH):
                chosen = torch.multinomial(_CHANCES, self._samples, replacement=True, generator=self._generator)
                walk.append(self._successors[walk[-1], chosen])
            tokens = torch.stack(walk, dim=1)
            yield tokens[:, :-1], tokens[:, 1:]


_CHANCES = torch.tensor([0.55, 0.25, 0.15, 0.05])


def entropy() -> float:
    """The least loss per token that any model can have."""
    return -sum(float(chance) * math.log(chance) for chance in _CHANCES)
