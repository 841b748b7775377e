"""Iterable data that can say its state goes on where a run stopped, and reads no sample again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import IterableDataset
from user_code import Passing, points

from runner.engine.window import StepBatch
from runner.model.datamodule import loaded
from runner.training.data.loading import first_batch, make_loader, resume_at
from runner.training.data.places import Place
from runner.training.resume import History, Progress

MANY = 100_000
Sample = tuple[torch.Tensor, torch.Tensor]


class Counted(IterableDataset[Sample]):
    """Random samples after each number; it counts how often each is read, also in loader workers."""

    def __init__(self, count: int) -> None:
        self.read = torch.zeros(count, dtype=torch.int32).share_memory_()  # type: ignore[no-untyped-call]
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[Sample]:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.read):
            number, self.at = self.at, self.at + 1
            self.read[number] += 1
            yield torch.cat([torch.tensor([float(number)]), torch.randn(1)]), torch.tensor(number)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


class Forgetful(Counted):
    """Its samples come out of a buffer that its state does not hold."""

    def __iter__(self) -> Iterator[Sample]:
        samples = super().__iter__()
        held = [next(samples) for _ in range(3)]
        for sample in samples:
            held.append(sample)
            yield held.pop(0)
        yield from held


class _Numbers:
    """An iterator that says its state itself."""

    def __init__(self, count: int) -> None:
        self.at, self.count = 0, count

    def __iter__(self) -> _Numbers:
        return self

    def __next__(self) -> Sample:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        return torch.full((2,), float(self.at)), torch.tensor(self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OfIterators(IterableDataset[Sample]):
    def __iter__(self) -> _Numbers:
        return _Numbers(29)


def loader(dataset: Any, length: int | None = None, **changed: Any) -> Any:
    options: dict[str, Any] = {"batch_size": 8, "data": 1, "replica": 0, "inputs": True, "targets": True}
    return make_loader(dataset, length, **{**options, "shuffle": False, "seed": 5, **changed})


def some(made: Any, count: int) -> list[StepBatch]:
    return [batch for _, batch in zip(range(count), made, strict=False)]


def assert_same(found: list[StepBatch], expected: list[StepBatch]) -> None:
    assert [batch.samples for batch in found] == [batch.samples for batch in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def place_after(steps: int, dataset: Any, **changed: Any) -> Place:
    """The place that a run through the data notes after its first steps, as a checkpoint gives it back."""
    made = loader(dataset, **changed)
    some(made, steps)
    place: Place | None = made.place_after(steps)
    assert place is not None
    return Place.from_entry(place.to_entry())


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_hundred_thousand_samples_none_is_read_again(workers: int) -> None:
    """It goes on at sample 90,000, on one replica and as one of four."""
    before = loader(Counted(MANY), batch_size=100)
    before.dataset._place = Place(899, 0, 89_900, False, {"at": 89_900})
    before.dataset._first = 899
    some(before, 1)
    place = before.place_after(900)
    assert place is not None
    assert (place.number, place.state) == (90_000, {"at": 90_000})
    dataset = Counted(MANY)
    for data, replica in ((1, 0), (4, 1)):
        resumed = loader(dataset, workers=workers, batch_size=100, data=data, replica=replica)
        assert resume_at(resumed, 0, 900, place) == ""
        (batch,) = some(resumed, 1)
        share = 100 // data
        assert batch.targets.tolist() == [*range(90_000 + replica * share, 90_000 + (replica + 1) * share)]
    assert int(dataset.read[:90_000].sum()) == 0
    assert int(dataset.read[90_000]) >= 2


@pytest.mark.parametrize(("workers", "steps"), [(0, 1), (2, 3), (0, 4), (2, 5), (0, 8)])
def test_it_goes_on_bit_for_bit_within_and_between_epochs(workers: int, steps: int) -> None:
    """29 samples in steps of 8, so that the fourth step of an epoch is short."""
    place = place_after(steps, Counted(29), workers=workers)
    resumed = loader(Counted(29), workers=workers)
    assert resume_at(resumed, 0, steps, place) == ""
    expected = some(loader(Counted(29)), steps + 6)[steps:]
    assert_same([first_batch(resumed)], expected[:1])
    assert_same(some(resumed, 6), expected)
    again = place_after(steps, Counted(29))
    assert again == place


@pytest.mark.parametrize("replicas", [1, 3])
def test_it_goes_on_with_another_number_of_replicas_and_workers(replicas: int) -> None:
    place = place_after(3, Counted(29), data=2, replica=1)
    found = []
    for replica in range(replicas):
        resumed = loader(Counted(29), data=replicas, replica=replica, workers=replica)
        resume_at(resumed, 0, 3, place)
        found.append(some(resumed, 4))
    for step, expected in enumerate(some(loader(Counted(29)), 7)[3:]):
        assert torch.equal(torch.cat([part[step].inputs for part in found]), expected.inputs)


def test_a_resumed_run_notes_its_places_too() -> None:
    resumed = loader(Counted(29))
    place = place_after(3, Counted(29))
    assert resume_at(resumed, 0, 3, place) == ""
    assert resumed.place_after(3) == place  # of a save before the first step
    some(resumed, 4)
    assert resumed.place_after(7) == place_after(7, Counted(29))


def test_an_iterator_may_say_its_state() -> None:
    place = place_after(2, OfIterators())
    assert place.of_iterator
    resumed = loader(OfIterators())
    assert resume_at(resumed, 0, 2, place) == ""
    assert_same(some(resumed, 5), some(loader(OfIterators()), 7)[2:])


@pytest.mark.parametrize(("workers", "steps"), [(0, 2), (2, 5)])
def test_a_state_that_does_not_bring_back_its_place_is_told_and_read_again(workers: int, steps: int) -> None:
    dataset = Forgetful(29)
    resumed = loader(dataset, workers=workers)
    assert "not give the sample that followed" in resume_at(resumed, 0, steps, place_after(steps, Forgetful(29)))
    assert resumed.place_after(steps) is None
    assert_same(some(resumed, 5), some(loader(Forgetful(29)), steps + 5)[steps:])


def test_data_that_lost_its_state_is_told_and_read_again() -> None:
    items = [points(29)[0][i] for i in range(29)]
    resumed = loader(Passing(items))
    assert "load_state_dict" in resume_at(resumed, 0, 3, place_after(3, Counted(29)))
    assert_same(some(resumed, 1), some(loader(Passing(items)), 4)[3:])


def test_a_state_that_no_checkpoint_can_hold_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "state_dict", lambda self: {"at": {self.at}})
    made = loader(Counted(29))
    some(made, 2)
    assert made.place_after(2) is None


@pytest.mark.parametrize("is_numbered", [True, False])
def test_other_data_has_no_place(is_numbered: bool) -> None:
    items = [points(9)[0][i] for i in range(9)]
    made = loader(items, 9) if is_numbered else loader(Passing(items))
    some(made, 1)
    assert made.place_after(1) is None


def test_a_stream_of_hugging_face_goes_on() -> None:
    datasets = pytest.importorskip("datasets")

    def made() -> Any:
        found = datasets.Dataset.from_dict({"number": [*range(29)]}).to_iterable_dataset(num_shards=3)
        return found.with_format("torch")

    def pair(samples: list[dict[str, torch.Tensor]]) -> Sample:
        numbers = torch.stack([sample["number"] for sample in samples])
        return numbers, numbers + 1

    place = place_after(5, made(), collate=pair)
    resumed = loader(made(), collate=pair, workers=2)
    assert resume_at(resumed, 0, 5, place) == ""
    assert_same(some(resumed, 5), some(loader(made(), collate=pair), 10)[5:])
    order = [made().shuffle(seed=1, buffer_size=8) for _ in range(3)]
    resumed = loader(order[0], collate=pair)
    assert resume_at(resumed, 0, 2, place_after(2, order[1], collate=pair)) != ""  # its buffer is not in its state
    assert_same(some(resumed, 4), some(loader(order[2], collate=pair), 6)[2:])


class SharedEpoch(IterableDataset[Sample]):
    """Two samples in an epoch, which it holds in shared memory as Hugging Face's do; one of its readers is slow."""

    def __init__(self) -> None:
        self.epoch, self.readers = (torch.zeros(1).share_memory_() for _ in range(2))  # type: ignore[no-untyped-call]
        self.is_slow: bool | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Sample]:
        if self.is_slow is None:
            self.is_slow = int(self.readers) == 0
            self.readers += 1
        for number in range(2):
            time.sleep(0.05 if self.is_slow else 0)
            yield self.epoch.clone(), torch.tensor(number)


def test_workers_that_share_a_dataset_s_epoch_do_not_change_each_other_s() -> None:
    found = some(loader(SharedEpoch(), batch_size=2, workers=2), 8)
    assert [batch.inputs.flatten().tolist() for batch in found] == [[float(epoch)] * 2 for epoch in range(8)]


class Loaders(pl.LightningDataModule):
    """Its loaders are torchdata's, which has samplers of its own."""

    def __init__(self, dataset: Any, shuffle: bool | None) -> None:
        super().__init__()
        self.dataset, self.shuffle = dataset, shuffle

    def train_dataloader(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(self.dataset, batch_size=4, shuffle=self.shuffle)


@pytest.mark.parametrize("shuffle", [False, True, None])
def test_a_stateful_loader_gives_its_dataset(shuffle: bool | None) -> None:
    """The runner resumes it by itself, a stream by the state of its dataset."""
    pytest.importorskip("torchdata")
    dataset = points(9)[0] if shuffle is not None else Counted(29)
    (found, collate), _, _ = loaded(Loaders(dataset, shuffle), "mine:data")
    assert found is dataset
    if shuffle is None:
        place = place_after(2, found, collate=collate)
        assert place.state == {"at": 16}


def test_a_checkpoint_has_the_place() -> None:
    place = place_after(3, Counted(29))
    progress = Progress(3, 3, None, History(), {}, {}, "", place=place)
    assert Progress.from_entry(progress.to_entry()).place == place
