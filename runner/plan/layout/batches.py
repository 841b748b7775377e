"""Divides one optimizer step's samples among replicas and micro-batches, with arithmetic only.

Step k takes samples [kB, (k+1)B) of the seeded order; replica d takes the d-th contiguous part of them and cuts it into
T micro-batches. Both cuts are those of torch's ``tensor_split``: the first ``n % parts`` parts get one sample more.
Parts may be empty if there are more parts than samples. Micro-batches may also have shares of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TypeAlias

__all__ = [
    "Parts",
    "largest_microbatch",
    "largest_sizes",
    "mean_microbatch",
    "microbatch_sizes",
    "microbatch_slices",
    "replica_slice",
    "split_sizes",
    "step_range",
]


Parts: TypeAlias = int | Sequence[float]
"""How samples are divided: into so many parts alike, or by the share of each part."""


def split_sizes(n: int, parts: Parts) -> tuple[int, ...]:
    """The sizes of the parts, which add up to n.

    Parts alike are those of ``torch.tensor_split(n elements, parts)``. Of parts with shares, the first k together end
    after their share of n, rounded to the nearest whole number, and up from a half.

    Raises:
        ValueError: if n is negative or there is no part.
    """
    if n < 0 or (parts < 1 if isinstance(parts, int) else not parts):
        raise ValueError(f"cannot split {n} samples into {parts} parts")
    if not isinstance(parts, int):
        shares = [Fraction(each) for each in parts]
        ends = [int(n * end / sum(shares) + Fraction(1, 2)) for end in accumulate(shares, initial=Fraction(0))]
        return tuple(end - begin for begin, end in pairwise(ends))
    size, extra = divmod(n, parts)
    return (size + 1,) * extra + (size,) * (parts - extra)


def step_range(step: int, batch: int) -> range:
    """The positions in the seeded order that optimizer step ``step`` (0-based) takes."""
    return range(step * batch, (step + 1) * batch)


def replica_slice(batch: int, data: int, replica: int) -> slice:
    """The samples of a replica as a slice of a step's ``batch``."""
    return _slices(split_sizes(batch, data))[replica]


def microbatch_sizes(batch: int, data: int, replica: int, microbatches: Parts) -> tuple[int, ...]:
    """The number of samples of each micro-batch of one replica, in order."""
    return split_sizes(split_sizes(batch, data)[replica], microbatches)


def microbatch_slices(batch: int, data: int, replica: int, microbatches: Parts) -> tuple[slice, ...]:
    """The micro-batches of one replica as slices of the whole step's ``batch``."""
    start = replica_slice(batch, data, replica).start
    return _slices(microbatch_sizes(batch, data, replica, microbatches), start)


def largest_microbatch(batch: int, data: int, microbatches: Parts) -> int:
    """The number of samples of a step's largest micro-batch."""
    return max(largest_sizes(batch, data, microbatches))


def largest_sizes(batch: int, data: int, microbatches: Parts) -> tuple[int, ...]:
    """The number of samples of each micro-batch in the replica that has most of them in it.

    The first replicas have one sample more than the last ones, or as many; shares are rounded in each by itself.
    """
    kinds = (microbatch_sizes(batch, data, replica, microbatches) for replica in {0, data - 1})
    return tuple(map(max, zip(*kinds, strict=True)))


def mean_microbatch(batch: int, data: int, microbatches: Parts) -> float:
    """The mean number of samples per micro-batch in the replica with most samples, for which a step waits."""
    return split_sizes(batch, data)[0] / (microbatches if isinstance(microbatches, int) else len(microbatches))


def _slices(sizes: tuple[int, ...], start: int = 0) -> tuple[slice, ...]:
    ends = tuple(accumulate(sizes, initial=start))
    return tuple(slice(begin, end) for begin, end in zip(ends[:-1], ends[1:], strict=True))
