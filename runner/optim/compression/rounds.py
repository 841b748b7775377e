"""The form of a compressor of gradients: a generator that asks for sums and gatherings over the replicas.

A compressor gets one replica's tensors and yields :class:`Total` or :class:`Parts`, one message each time. It gets back
the sum of all replicas' messages, or the list of them, and returns :class:`Exchanged` in the end. It knows nothing of
transports, residuals and checkpoints: :class:`runner.engine.update.compressed.CompressedSum` does all that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Compress", "Exchanged", "Kept", "GradientStep", "Parts", "Rounds", "Total", "Turn", "joined", "split_like"]

Kept: TypeAlias = Mapping[str, Tensor]
"""What a compressor keeps of one tensor until the next step, besides the residual; the same on all replicas."""


@dataclass(frozen=True, slots=True)
class GradientStep:
    """The step whose gradients are summed.

    Args:
        index: its index in the run.
        loss_scale: the factor by which its losses, and so its gradients, were multiplied.
        seed: the run's seed.
    """

    index: int = 0
    loss_scale: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What a compressor may depend on, besides the tensors.

    Args:
        step: number of the step, counted from the first one that is compressed.
        replicas: the number of replicas.
        shared_seed: the same on all replicas, and another one at each step.
        own_seed: another one on each replica and at each step.
    """

    step: int
    replicas: int
    shared_seed: int = 0
    own_seed: int = 1


@dataclass(frozen=True, slots=True)
class Total:
    """Asks for the sum of all replicas' tensors, which have one shape; the tensor is overwritten."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """Asks for the list of all replicas' tensors, which have one shape, in the order of the replicas."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The result of a compressor, one entry for each of its tensors.

    Args:
        sums: what the replicas have sent, added up; the same on all replicas.
        left: this replica's tensor without what this replica has sent: the residual.
        kept: what the compressor wants to have in the next step.
    """

    sums: Sequence[Tensor]
    left: Sequence[Tensor]
    kept: Sequence[Kept]


Rounds: TypeAlias = Generator["Total | Parts", Any, Exchanged]

Compress: TypeAlias = Callable[[Sequence[Tensor], Sequence[Kept], Turn], Rounds]
"""Starts the exchange of one stage's tensors, which it may overwrite: fp32, in the parameters' shapes.

If a replica has an element that is not finite, some sum must not be finite, on all replicas.
"""


def joined(values: Sequence[Tensor]) -> Tensor:
    """All elements as one flat tensor, [elements]."""
    return torch.cat([value.reshape(-1) for value in values])


def split_like(flat: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`joined`: views of ``flat`` in the shapes of ``values``."""
    parts = torch.split(flat, [value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
