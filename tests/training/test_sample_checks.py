"""Ranks that load the same samples notice if they differ: by checksums of steps, and of a few samples before them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from runner.engine.window import StepBatch
from runner.model.data import Datasets
from runner.training.data.agreement import different_samples, some_checksums
from runner.training.data.batches import batch_checksum
from runner.training.data.loading import StepSampler, first_batch, make_loader

LENGTH = 44


class Drawing(Dataset[Any]):
    """Draws inputs, or targets, from a generator of its own, for the samples whose numbers it is given."""

    def __init__(self, numbers: Container[int], what: str) -> None:
        self.generator = np.random.default_rng()
        self.numbers, self.what = numbers, what

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> Any:
        drawn = float(self.generator.random()) if number in self.numbers else 0.0
        return (
            torch.full((3,), number + (drawn if self.what == "inputs" else 0.0)),
            torch.tensor(drawn if self.what == "targets" else 0.0),
        )


def loader(dataset: Any, **changed: Any) -> Any:
    options: dict[str, Any] = {
        "batch_size": 8, "data": 1, "replica": 0, "inputs": True, "targets": False, "shuffle": False, "seed": 5,
        "check_every": 4,
    }  # fmt: skip
    return make_loader(dataset, LENGTH, **{**options, **changed})


def differing(numbers: Container[int], what: str, **changed: Any) -> list[int]:
    """The steps of two epochs in which the first and the last rank of a pipeline see that they differ."""
    ends = [{"inputs": True, "targets": False}, {"inputs": False, "targets": True}]
    first, last = (_steps(loader(Drawing(numbers, what), **end, **changed)) for end in ends)
    return [step for step, (one, other) in enumerate(zip(first, last, strict=True)) if one.checksum != other.checksum]


def _steps(made: Any) -> list[StepBatch]:
    found = []
    for epoch in range(2):
        made.batch_sampler.set_epoch(epoch)
        found += list(made)
    return found


@pytest.mark.costly
@pytest.mark.parametrize("what", ["inputs", "targets"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_and_the_last_sample_of_each_step_are_compared(what: str, workers: int) -> None:
    """Though neither rank needs both parts of a sample. Steps have eight samples, the last step of an epoch four."""
    assert differing(range(0, LENGTH, 8), what, workers=workers) == list(range(12))
    assert differing(range(23, 24), what, workers=workers) == [2, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_all_samples_are_compared_every_so_many_steps(workers: int) -> None:
    """Steps 0, 4 and 8 of the run, over two epochs of six steps."""
    middle = (3, 11, 19, 27, 35, 42)
    assert differing(middle, "inputs", workers=workers) == [0, 4, 8]
    assert differing(middle, "targets", workers=workers, check_every=5) == [0, 5, 10]
    assert differing(range(0), "inputs", workers=workers) == []


def test_all_samples_of_the_first_step_after_a_resume_are_compared() -> None:
    ends = [loader(Drawing(range(27, 28), "inputs"), check_every=100) for _ in range(2)]
    for made in ends:
        made.batch_sampler.resume_at(0, 3)
    assert first_batch(ends[0]).checksum != first_batch(ends[1]).checksum


def test_a_resume_at_the_end_of_an_epoch_compares_the_next_one() -> None:
    sampler = StepSampler(LENGTH, 8, data=1, replica=0, shuffle=False, seed=0, check_every=100)
    sampler.resume_at(0, 6)
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert [step.whole for step in sampler] == [True, *[False] * 5]


def test_each_replica_has_checksums_of_its_own_samples() -> None:
    """Those of samples 8 to 15; the second replica has four of them."""
    options = {"data": 2, "check_every": 1}
    first, second = (
        [_steps(loader(Drawing(range(12, 16), "inputs"), replica=r, **options)) for _ in "ab"] for r in (0, 1)
    )
    assert [one.checksum == other.checksum for one, other in zip(*first, strict=True)] == [True] * 12
    assert [one.checksum == other.checksum for one, other in zip(*second, strict=True)] == [
        step % 6 != 1 for step in range(12)
    ]


def test_a_checksum_covers_every_bit_shape_and_place() -> None:
    x, y = torch.randn(6, 4), torch.arange(6)
    plain = batch_checksum(x, y, whole=True)
    assert batch_checksum(x.clone(), y.clone(), whole=True) == plain
    swapped, flipped = x.clone(), x.clone()
    swapped[[2, 3]] = x[[3, 2]]
    flipped.view(torch.int32)[2, 1] ^= 1
    others = [
        (swapped, y),
        (flipped, y),
        (x, y.roll(1)),
        (x.view(6, 2, 2), y),
        (x, y.int()),
        ({"x": x}, y),
        ([x, 3], y),
    ]
    assert plain not in {batch_checksum(*batch, whole=True) for batch in others}
    assert batch_checksum([x, "a"], y, whole=True) != batch_checksum([x, "b"], y, whole=True)
    assert batch_checksum(x.bfloat16(), y, whole=True) != batch_checksum(x.half(), y, whole=True)
    ends = batch_checksum(x, y, whole=False)
    assert ends == batch_checksum(swapped, y, whole=False)
    assert ends != batch_checksum(x.roll(1, 0), y, whole=False)


def test_a_few_samples_are_compared_over_all_ranks_that_load() -> None:
    seeded, own = (
        [some_checksums(Datasets(each(), None), 0) for _ in "ab"]
        for each in (Seeded, lambda: Drawing(range(LENGTH), "targets"))
    )
    assert sorted(seeded[0]) == [0, 14, 28, 43]
    assert different_samples([seeded[0], None, seeded[1]]) is None
    assert different_samples([own[0], None, own[1]]) == (0, (0, 2))
    assert different_samples([seeded[0], {**seeded[0], 28: 1}]) == (28, (0, 1))


def test_a_length_that_differs_between_ranks_is_found() -> None:
    assert different_samples([{0: 1, 3: 2}, {0: 1, 5: 2}]) == (3, (0, 1))


class Seeded(Dataset[Any]):
    """Draws from generators that the runner seeds."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> Any:
        return torch.randn(3) + float(np.random.randn()), torch.tensor(0)
