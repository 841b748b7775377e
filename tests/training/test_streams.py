"""Iterable data gives the steps that numbered data in its own order gives, whoever reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from user_code import Passing, points, sentences

from runner.config.schema import DataConfig
from runner.engine.window import StepBatch
from runner.errors import RunFailedError
from runner.model.data import example_batch, load_datasets
from runner.training.data.loading import first_batch, make_loader, resume_at
from runner.training.data.streams import count_samples

ITEMS = [points(29)[0][i] for i in range(29)]


def loader(dataset: Any, length: int | None, **changed: Any) -> Any:
    options: dict[str, Any] = {
        "batch_size": 8,
        "data": 1,
        "replica": 0,
        "inputs": True,
        "targets": True,
        "shuffle": False,
        "seed": 5,
    }
    return make_loader(dataset, length, **{**options, **changed})


def some(made: Any, count: int) -> list[StepBatch]:
    return [batch for _, batch in zip(range(count), made, strict=False)]


def assert_same(found: list[StepBatch], expected: list[StepBatch]) -> None:
    assert [batch.samples for batch in found] == [batch.samples for batch in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


@pytest.mark.parametrize(("workers", "data", "replica"), [(0, 1, 0), (2, 2, 0), (0, 2, 1), (2, 6, 5)])
def test_two_epochs_of_uneven_steps(workers: int, data: int, replica: int) -> None:
    share: dict[str, Any] = {"data": data, "replica": replica}
    numbered = loader(ITEMS, 29, **share)
    assert_same(some(loader(Passing(ITEMS), None, workers=workers, **share), 8), [*numbered, *numbered])


@pytest.mark.parametrize("workers", [0, 2])
def test_one_pass_ends_and_has_a_length(workers: int) -> None:
    made = loader(Passing(ITEMS), 29, workers=workers)
    assert len(made) == 4
    assert_same(list(made), list(loader(ITEMS, 29)))
    assert_same(list(made), list(loader(ITEMS, 29)))


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_after_a_number_of_steps(workers: int) -> None:
    whole, resumed = loader(Passing(ITEMS), None), loader(Passing(ITEMS), None, workers=workers)
    resume_at(resumed, 0, 6)
    assert_same([first_batch(resumed)], some(whole, 7)[6:])
    assert_same(some(resumed, 4), some(whole, 10)[6:])


class Noisy(IterableDataset[Any]):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        for _ in range(10):
            yield torch.randn(3), torch.tensor(0)


def test_random_samples_depend_on_seed_epoch_and_place_alone() -> None:
    dataset = Noisy()
    first, last = some(loader(dataset, None), 4), some(loader(Noisy(), None, workers=2), 4)
    assert_same(last, first)
    assert not torch.equal(first[0].inputs, first[2].inputs)
    assert dataset.epochs == [0, 1]
    assert first[0].checksum is not None
    assert first[0].checksum != first[2].checksum


def test_a_dataset_that_gives_nothing_the_second_time_is_told() -> None:
    class Used(IterableDataset[Any]):
        def __init__(self) -> None:
            self.items = iter(ITEMS)

        def __iter__(self) -> Any:
            yield from self.items

    with pytest.raises(RunFailedError, match="no sample in its epoch 1"):
        some(loader(Used(), None), 8)


def test_a_set_is_counted_where_it_does_not_say_its_length() -> None:
    assert count_samples(Passing(ITEMS)) == count_samples(ITEMS) == 29


def test_a_datamodule_without_validation_gives_its_collate_function() -> None:
    config = DataConfig(target="user_code:collated_data")
    found = load_datasets(config, 0)
    assert found.validation is None
    words, following = found.collate(sentences()[:3])
    assert words.shape == following.shape
    assert example_batch(config, 2, 0)[0].shape == (2, max(len(each["words"]) for each in sentences()))


@pytest.mark.parametrize("length", [None, 12])
def test_a_rank_without_data_draws_nothing_from_the_models_generator(length: int | None) -> None:
    """One validation more or less would change the random state that is saved."""
    before = torch.get_rng_state()
    next(iter(loader(None, length)))
    assert torch.equal(torch.get_rng_state(), before)
