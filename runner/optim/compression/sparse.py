"""A part of each tensor's elements: the largest ones of each replica, or random ones that all replicas choose alike.

Sources: Stich et al. 2018, "Sparsified SGD with Memory" (top-k with a residual, random-k); the residual is added to the
gradient, where the paper adds it to the gradient times the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from runner.optim.compression.rounds import Compress, Exchanged, Kept, Parts, Rounds, Total, Turn, joined, split_like

__all__ = ["random_k", "top_k"]


def top_k(density: float) -> Compress:
    """Send the ceil(density * elements) largest elements of each tensor, as fp32 values and int32 places."""

    def compress(values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Rounds:
        flat = joined(values)
        magnitudes = flat.abs()  # NaN counts as the largest, so that it is always sent
        chosen = _places(values, lambda at, size: _top(magnitudes[at : at + size], density))
        message = torch.cat([flat[chosen].view(torch.uint8), chosen.int().view(torch.uint8)])
        flat[chosen] = 0.0
        total = torch.zeros_like(flat)
        for part in (yield Parts(message)):
            total.index_add_(0, *_read(part))
        return Exchanged(split_like(total, values), split_like(flat, values), kept)

    return compress


def random_k(density: float, *, unbiased: bool) -> Compress:
    """Send ceil(density * elements) random elements of each tensor, whose places follow from the seed.

    Args:
        density: the share of the elements.
        unbiased: whether what is sent is multiplied by elements / k, so that its mean is the whole tensor. It must not
            be where the residual is added the next time.
    """

    def compress(values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Rounds:
        flat = joined(values)
        generator = torch.Generator(flat.device).manual_seed(turn.shared_seed)
        chosen = _places(values, lambda _, size: _drawn(size, density, generator))
        sent = flat[chosen] + 0.0 * flat.abs().amax()  # not a number if an element that is not sent is not finite
        if unbiased:
            sent *= torch.cat([_growth(value.numel(), density, flat.device) for value in values])
        flat[chosen] -= sent
        total = torch.zeros_like(flat)
        total[chosen] = yield Total(sent)
        return Exchanged(split_like(total, values), split_like(flat, values), kept)

    return compress


def _count(elements: int, density: float) -> int:
    return math.ceil(density * elements)


def _places(values: Sequence[Tensor], choose: Callable[[int, int], Tensor]) -> Tensor:
    """The chosen places of all tensors in the flat tensor, int64; ``choose`` gets a tensor's begin and its size."""

    def each() -> Iterator[Tensor]:
        begin = 0
        for value in values:
            yield begin + choose(begin, value.numel())
            begin += value.numel()

    return torch.cat(list(each()))


def _top(magnitudes: Tensor, density: float) -> Tensor:
    return magnitudes.topk(_count(len(magnitudes), density), sorted=False).indices


def _drawn(elements: int, density: float, generator: torch.Generator) -> Tensor:
    return torch.randperm(elements, generator=generator, device=generator.device)[: _count(elements, density)]


def _growth(elements: int, density: float, device: torch.device) -> Tensor:
    count = _count(elements, density)
    return torch.full((count,), elements / max(1, count), device=device)


def _read(message: Tensor) -> tuple[Tensor, Tensor]:
    """The places, int64, and the values, fp32, of a message."""
    values, places = message.view(2, -1).clone().unbind()
    return places.view(torch.int32).long(), values.view(torch.float32)
