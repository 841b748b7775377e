"""Gradients in 16 bits: each replica rounds its tensors, and the sum is made in that format, too.

Numbers of float16 reach to 65504 alone. So all replicas multiply by the same power of two, which keeps the sum below
that; what becomes too small for the format is left over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runner.optim.compression.rounds import Compress, Exchanged, Kept, Parts, Rounds, Total, Turn, joined, split_like

__all__ = ["halved"]

_EXPONENT = 15
"""Sums stay below 2**15, where float16 ends just below 2**16."""


def halved(dtype: torch.dtype) -> Compress:
    """Round to ``dtype``: float16 or bfloat16, which has the range of float32 and needs no factor."""

    def compress(values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Rounds:
        flat, factor = joined(values), 1.0
        if dtype == torch.float16:
            largest = yield Parts(flat.abs().amax().reshape(1))
            factor = _factor(turn.replicas * float(torch.cat(largest).amax()))
        sent = (flat * factor).to(dtype)
        left = flat - sent.float() / factor
        total = yield Total(sent)
        return Exchanged(split_like(total.float() / factor, values), split_like(left, values), kept)

    return compress


def _factor(most: float) -> float:
    """The power of two that brings ``most`` below 2**15; not a number if ``most`` is not finite."""
    return 2.0 ** (_EXPONENT - max(math.frexp(most)[1], -100)) if math.isfinite(most) else math.nan
