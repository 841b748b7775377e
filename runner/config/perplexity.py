"""The perplexity of a model of tokens: what its loss means as a number of equally likely tokens."""

from __future__ import annotations

import math

__all__ = ["counts_tokens", "perplexity"]

_OF_TOKENS = ("cross_entropy", "token_cross_entropy")


def counts_tokens(loss: str | None, tokens: float | None) -> bool:
    """Whether a loss is a mean cross-entropy over tokens, in nats.

    Args:
        loss: the option of ``loss``.
        tokens: the tokens of a step; None or 0 if its samples are not made of tokens.
    """
    return bool(tokens) and loss in _OF_TOKENS


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large."""
    return math.exp(loss) if loss < 700 else math.inf
