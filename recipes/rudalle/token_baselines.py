"""What one can predict of image tokens without a network: cross-entropies in nats per token to beat."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TokenBaselines", "measure_baselines"]

_SMOOTHING = 0.1  # count added for every code, so that none is impossible


@dataclass(frozen=True, slots=True)
class TokenBaselines:
    """Cross-entropies on the valid tokens of predictors counted on the training tokens.

    ``uniform`` knows the number of codes, ``unigram`` how often each occurs, ``position_unigram`` how often at
    this position, ``left_bigram`` how often after the code on the left (a row's first position has its own count).
    """

    uniform: float
    unigram: float
    position_unigram: float
    left_bigram: float


def measure_baselines(train: Tensor, valid: Tensor, num_codes: int, grid: int) -> TokenBaselines:
    """Baselines from image codes [n, grid²] of training and valid images."""
    return TokenBaselines(
        uniform=math.log(num_codes),
        unigram=_cross_entropy(torch.zeros_like(train), torch.zeros_like(valid), train, valid, 1, num_codes),
        position_unigram=_cross_entropy(_positions(train), _positions(valid), train, valid, train.shape[1], num_codes),
        left_bigram=_cross_entropy(
            _left(train, num_codes, grid), _left(valid, num_codes, grid), train, valid, num_codes + 1, num_codes
        ),
    )


def _cross_entropy(
    train_context: Tensor, valid_context: Tensor, train: Tensor, valid: Tensor, num_contexts: int, num_codes: int
) -> float:
    """Of valid codes given an integer context, by counts of (context, code) in the training codes."""
    pairs = (train_context * num_codes + train).flatten()
    counts = torch.bincount(pairs, minlength=num_contexts * num_codes).view(num_contexts, num_codes)
    smoothed = counts.double() + _SMOOTHING
    log_probability = (smoothed / smoothed.sum(dim=1, keepdim=True)).log()
    return float(-log_probability[valid_context, valid].mean())


def _positions(codes: Tensor) -> Tensor:
    return torch.arange(codes.shape[1]).expand_as(codes)


def _left(codes: Tensor, num_codes: int, grid: int) -> Tensor:
    """The code on the left; ``num_codes`` in a row's first column."""
    left = codes.roll(1, dims=1)
    left[:, ::grid] = num_codes
    return left
