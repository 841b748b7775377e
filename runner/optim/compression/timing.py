"""Times what a compressor computes in a step: messages are answered at once, as if all replicas had sent the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from runner.optim.compression.rounds import Compress, Exchanged, Kept, Parts, Turn

__all__ = ["compression_seconds"]


@torch.no_grad()
def compression_seconds(
    compress: Compress, shapes: Sequence[tuple[int, ...]], replicas: int, device: torch.device, *, runs: int
) -> float:
    """The median seconds of a step, after one that is not counted.

    Args:
        compress: the compressor.
        shapes: the shapes of the tensors, whose values are random.
        replicas: the number of replicas, whose messages are read.
        device: the device of the tensors.
        runs: the number of steps that count.
    """
    generator = torch.Generator(device).manual_seed(0)
    gradients = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    residuals = [torch.zeros_like(each) for each in gradients]
    kept: Sequence[Kept] = [{} for _ in shapes]
    seconds = []
    for step in range(runs + 1):
        start = time.perf_counter()
        values = [each.clone().add_(left) for each, left in zip(gradients, residuals, strict=True)]
        found = _exchange(compress, values, kept, Turn(step, replicas, step, step))
        for gradient, total in zip(gradients, found.sums, strict=True):
            gradient.copy_(total / replicas)
        residuals, kept = [left / 1.0 for left in found.left], found.kept
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def _exchange(compress: Compress, values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Exchanged:
    """A whole step of one replica among others that send what it sends."""
    rounds = compress(values, kept, turn)
    request = next(rounds)
    while True:
        several = isinstance(request, Parts)
        answer = [request.tensor] * turn.replicas if several else request.tensor.mul_(turn.replicas)
        try:
            request = rounds.send(answer)
        except StopIteration as stop:
            found: Exchanged = stop.value
            return found
