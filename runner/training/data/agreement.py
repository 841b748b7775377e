"""Compares, before the first step, what the ranks that load data get for the same samples.

Every rank calls the user's data function for itself, and takes inputs, targets or a replica's part from the result. If
the function draws from a random generator that the runner cannot seed, each rank has other data, and a pipeline would
pair its inputs with the targets of other samples. During the run, each pipeline compares its steps
(:mod:`runner.engine.headers`).
"""

from __future__ import annotations

from runner.engine.transport.objects import all_gather_values
from runner.errors import RunFailedError
from runner.model.data import Datasets, collated, first_sample
from runner.model.seeds import OWN_GENERATOR, seeded
from runner.training.data.batches import batch_checksum

__all__ = ["different_samples", "require_same_samples", "some_checksums"]

_COMPARED = 4


def require_same_samples(datasets: Datasets | None, target: str, seed: int) -> None:
    """Compare a few samples over all ranks that load data; all ranks call it together.

    Args:
        datasets: what this rank has loaded; None on a rank that loads nothing.
        target: names the data function, for the message.
        seed: the run's seed.

    Raises:
        RunFailedError: samples differ between ranks; every rank raises the error.
    """
    own = some_checksums(datasets, seed) if datasets is not None else None
    found = different_samples(all_gather_values(own))
    if found is not None:
        number, ranks = found
        raise RunFailedError(
            f"data.target = {target}: sample {number} is not the same on ranks {ranks[0]} and {ranks[1]}; all ranks "
            f"must get the same from the data function, the dataset and data.collate: {OWN_GENERATOR}"
        )


def some_checksums(datasets: Datasets, seed: int) -> dict[int, int]:
    """Checksums of a few training samples by their numbers: the first one of an iterable dataset, else also others.

    Samples that cannot be loaded are left out; the step that needs one will say so.
    """
    count = 1 if datasets.streams else len(datasets.train)
    numbers = sorted({place * (count - 1) // max(1, _COMPARED - 1) for place in range(_COMPARED)})
    found = {number: _checksum(datasets, number, seed) for number in numbers}
    return {number: checksum for number, checksum in found.items() if checksum is not None}


def _checksum(datasets: Datasets, number: int, seed: int) -> int | None:
    with seeded(seed, "compare", number):
        try:
            sample = first_sample(datasets.train) if datasets.streams else datasets.train[number]
            return batch_checksum(*collated([sample], datasets.collate), whole=True)
        except Exception:  # of a user's code
            return None


def different_samples(checksums: list[dict[int, int] | None]) -> tuple[int, tuple[int, int]] | None:
    """The first sample whose checksums differ, and two ranks that differ in it; None if all agree.

    Args:
        checksums: what :func:`some_checksums` gave each rank; None for a rank that loads nothing. At least one loads.
    """
    loading = {rank: found for rank, found in enumerate(checksums) if found is not None}
    first, *others = loading
    for rank in others:
        for number in sorted(loading[first].keys() | loading[rank].keys()):
            if loading[first].get(number) != loading[rank].get(number):
                return number, (first, rank)
    return None
