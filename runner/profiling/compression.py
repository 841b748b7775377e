"""Counts the bytes that a compressor of gradients needs while it works, in exchanges on a part of the gradients.

An exchange is that of :class:`runner.engine.update.compressed.CompressedSum`: the compressor gets copies of the
gradients in fp32, and returns sums and what is left over, of which the next residual is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from runner.config.schema import RunConfig
from runner.model.live_tracker import LiveTracker
from runner.optim.catalogue.registry import compression_of
from runner.optim.compression.rounds import Compress, Exchanged, Kept, Parts, Turn

__all__ = ["compression_bytes", "exchange_bytes"]

_ELEMENTS = 1 << 18
"""So many show what an element needs: a few milliseconds and megabytes."""


def compression_bytes(config: RunConfig, shapes: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """The bytes that the request's compressor needs for each element, by field of a profile; see ``exchange_bytes``.

    Some need memory for one tensor at a time, a permutation of its elements, say: a stage whose largest tensor is a
    larger share of its elements than in the exchange that is tried needs more for each. An exchange of one says it.

    Args:
        config: the request, whose compressor has ``compress``.
        shapes: the shapes of the model's trained tensors, which have elements.
    """
    kind = compression_of(config.compression)
    assert kind.compress is not None
    feedback = kind.has_residuals(config.compression)
    compress, replicas = kind.compress(config.compression, feedback), max(2, config.parallelism.data)

    def rates(tried: Sequence[tuple[int, ...]]) -> tuple[float, float]:
        elements = sum(map(prod, tried))
        waiting, peak = exchange_bytes(compress, tried, replicas, feedback=feedback)
        return waiting / elements, peak / elements

    taken: list[tuple[int, ...]] = []
    for shape in shapes:
        taken.append(_cut(shape))
        if sum(map(prod, taken)) > _ELEMENTS:
            break
    largest = max(taken, key=prod)
    share = prod(largest) / sum(map(prod, taken))
    (waiting, peak), alone = rates(taken), rates([largest])[1]
    more = max(0.0, alone - peak) / (1 - share) if share < 1 else 0.0
    return {
        "compression_waiting_bytes": waiting,
        "compression_peak_bytes": peak,
        "compression_largest_share": share,
        "compression_largest_bytes": more,
    }


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape, with fewer rows where it has too many elements: those of low rank need more for each then."""
    return (max(1, shape[0] * _ELEMENTS // prod(shape)), *shape[1:]) if prod(shape) > _ELEMENTS else shape


@torch.no_grad()
def exchange_bytes(
    compress: Compress, shapes: Sequence[tuple[int, ...]], replicas: int, *, feedback: bool
) -> tuple[int, int]:
    """The bytes of an exchange, the larger of the first and the second, beside gradients and what it keeps.

    Args:
        compress: the compressor.
        shapes: the shapes of the tensors.
        replicas: the number of replicas, whose messages are as large as this one's.
        feedback: whether what is left over is kept.

    Returns:
        what is there while it waits for messages or for the end of the step; and the peak.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    kept: Sequence[Kept] = [{} for _ in shapes]
    waiting = peak = 0
    for step in range(2):
        with LiveTracker() as tracker:
            rounds = compress([each.clone() for each in gradients], kept, Turn(step, replicas))
            request, found = next(rounds), None
            while found is None:
                tensor = request.tensor
                answer = [tensor.clone() for _ in range(replicas)] if isinstance(request, Parts) else tensor
                waiting = max(waiting, tracker.live)
                try:
                    request = rounds.send(answer)
                except StopIteration as stop:
                    found = stop.value
            coming = _left(found) if feedback else []
            waiting = max(waiting, sum(each.numel() * each.element_size() for each in coming))
            peak, kept = max(peak, tracker.peak), found.kept
    return waiting, peak


def _left(found: Exchanged) -> list[torch.Tensor]:
    return [left / 1.0 for left in found.left]
