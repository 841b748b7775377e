"""Divides one optimizer step's samples among replicas and micro-batches, with arithmetic only.

Step k takes samples [kB, (k+1)B) of the seeded order; replica d takes the d-th contiguous part of them and cuts it into
T micro-batches. Both cuts are those of torch's ``tensor_split``: the first ``n % parts`` parts get one sample more.
Parts may be empty if there are more parts than samples.
"""

from __future__ import annotations

from itertools import accumulate

__all__ = [
    "largest_microbatch",
    "mean_microbatch",
    "microbatch_sizes",
    "microbatch_slices",
    "replica_slice",
    "split_sizes",
    "step_range",
]


def split_sizes(n: int, parts: int) -> tuple[int, ...]:
    """The sizes of ``torch.tensor_split(n elements, parts)``; they add up to n.

    Raises:
        ValueError: if n is negative or parts is below 1.
    """
    if n < 0 or parts < 1:
        raise ValueError(f"cannot split {n} samples into {parts} parts")
    size, extra = divmod(n, parts)
    return (size + 1,) * extra + (size,) * (parts - extra)


def step_range(step: int, batch: int) -> range:
    """The positions in the seeded order that optimizer step ``step`` (0-based) takes."""
    return range(step * batch, (step + 1) * batch)


def replica_slice(batch: int, data: int, replica: int) -> slice:
    """The samples of a replica as a slice of a step's ``batch``."""
    return _slices(split_sizes(batch, data))[replica]


def microbatch_sizes(batch: int, data: int, replica: int, microbatches: int) -> tuple[int, ...]:
    """The number of samples of each micro-batch of one replica, in order."""
    return split_sizes(split_sizes(batch, data)[replica], microbatches)


def microbatch_slices(batch: int, data: int, replica: int, microbatches: int) -> tuple[slice, ...]:
    """The micro-batches of one replica as slices of the whole step's ``batch``."""
    start = replica_slice(batch, data, replica).start
    return _slices(microbatch_sizes(batch, data, replica, microbatches), start)


def largest_microbatch(batch: int, data: int, microbatches: int) -> int:
    """The number of samples of a step's largest micro-batch, which is the first one of the first replica."""
    return microbatch_sizes(batch, data, 0, microbatches)[0]


def mean_microbatch(batch: int, data: int, microbatches: int) -> float:
    """The mean number of samples per micro-batch in the replica with most samples, for which a step waits."""
    return split_sizes(batch, data)[0] / microbatches


def _slices(sizes: tuple[int, ...], start: int = 0) -> tuple[slice, ...]:
    ends = tuple(accumulate(sizes, initial=start))
    return tuple(slice(begin, end) for begin, end in zip(ends[:-1], ends[1:], strict=True))
