"""Batches by optimizer step: step k takes samples [kB, (k+1)B) of the seeded order, whatever the layout.

Each sample is drawn under random generators seeded from (seed, epoch, sample number). A dataset with random
augmentation therefore gives the same sample to the first and to the last stage, for any number of workers and after a
resume.

Only ranks with the first or the last stage load data. The other ranks get batches that hold nothing but their number;
sizes reach them with the pipeline's header.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from runner.engine.window import StepBatch
from runner.model.data import Collate
from runner.model.layers import mix_seed
from runner.plan.layout.batches import replica_slice
from runner.training.data.batches import Batches
from runner.training.data.streams import EmptySteps, Share, SizedStream, StepStream
from runner.training.random_state import seeded

__all__ = [
    "SampleNumber",
    "StepSampler",
    "close_loader",
    "first_batch",
    "make_loader",
    "resume_at",
    "samples_per_epoch",
    "steps_per_epoch",
]

SampleNumber = tuple[int, int]
"""A sample, identified by the epoch and its number in the dataset."""


class StepSampler(Sampler[list[SampleNumber]]):
    """The sample numbers of one replica, step by step; every epoch has its own seeded order.

    The last step of an epoch may be short, and a replica may get no sample of it.

    Args:
        length: number of samples in the dataset.
        batch_size: samples per step, over all replicas.
        data, replica: data-parallel degree, and the number of this replica.
        shuffle: whether to shuffle; else samples come in the order of the dataset.
        seed: determines the order, together with the epoch.

    Attributes:
        epoch: the epoch of the next iteration.
    """

    def __init__(self, length: int, batch_size: int, *, data: int, replica: int, shuffle: bool, seed: int) -> None:
        self.length = length
        self.batch_size = batch_size
        self.epoch = 0
        self._resumed = (0, 0)
        self._data, self._replica, self._shuffle, self._seed = data, replica, shuffle, seed

    @property
    def sampler(self) -> StepSampler:
        """Itself; Lightning looks here for :meth:`set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def resume_at(self, epoch: int, step: int) -> None:
        """Start ``epoch`` after its first ``step`` steps; later epochs are complete."""
        self.epoch = epoch
        self._resumed = (epoch, step)

    def __len__(self) -> int:
        """Number of steps in a complete epoch."""
        return -(-self.length // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleNumber]]:
        epoch, order = self.epoch, self._order()
        first = self._resumed[1] if epoch == self._resumed[0] else 0
        for start in range(first * self.batch_size, self.length, self.batch_size):
            step = order[start : start + self.batch_size]
            yield [(epoch, number) for number in step[replica_slice(len(step), self._data, self._replica)]]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(mix_seed(self._seed, self.epoch))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


class _SeededSamples(Dataset[Any]):
    """A dataset indexed by :data:`SampleNumber` that draws each sample under its own random generators."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: SampleNumber) -> Any:
        with seeded(self._seed, *number):
            return self._dataset[number[1]]


class _Numbered:
    """The ``collate_fn`` of the loader of a map-style dataset."""

    def __init__(self, dataset: _SeededSamples, batches: Batches) -> None:
        self._dataset, self._batches = dataset, batches

    def __call__(self, samples: Sequence[Any]) -> StepBatch:
        return self._batches.of(samples, lambda: self._dataset[0, 0])


class _NumbersOnly(Dataset[Any]):
    """A dataset of sample numbers, for a rank that needs no data."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: SampleNumber) -> int:
        return number[1]


def _know_nothing(samples: Sequence[int]) -> StepBatch:
    return StepBatch()


def make_loader(
    dataset: Any | None,
    length: int | None,
    *,
    batch_size: int,
    data: int,
    replica: int,
    inputs: bool,
    targets: bool,
    shuffle: bool,
    seed: int,
    workers: int = 0,
    collate: Collate = default_collate,
) -> DataLoader[Any]:
    """Make the data loader of one rank.

    Args:
        dataset: None on a rank that loads nothing.
        length: number of samples, known to every rank; None for an iterable dataset, which restarts when it ends.
        batch_size: samples of a step over all replicas.
        inputs, targets: whether this rank has the first or the last stage.
        collate: samples to a batch ``(input, target)``.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, 0x10AD))  # separate from the model's random numbers
    batches = Batches(collate, inputs=inputs, targets=targets, checked=isinstance(dataset, IterableDataset))
    sample_seed = mix_seed(seed, 0x5A3B)
    common: dict[str, Any] = {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "generator": generator,
        "worker_init_fn": _leave_signals_to_rank if workers else None,
    }
    if isinstance(dataset, IterableDataset):
        share = Share(batch_size, data, replica)
        stream = (
            StepStream(dataset, batches, share, seed=sample_seed, endless=True)
            if length is None
            else SizedStream(dataset, batches, share, seed=sample_seed, length=length)
        )
        return DataLoader(stream, batch_size=None, collate_fn=_as_it_is, **common)
    if length is None:
        return DataLoader(EmptySteps(), batch_size=None, collate_fn=_as_it_is)
    sampler = StepSampler(length, batch_size, data=data, replica=replica, shuffle=shuffle, seed=seed)
    if dataset is None:
        return DataLoader(_NumbersOnly(length), batch_sampler=sampler, collate_fn=_know_nothing)
    samples = _SeededSamples(dataset, sample_seed)
    return DataLoader(samples, batch_sampler=sampler, collate_fn=_Numbered(samples, batches), **common)


def _leave_signals_to_rank(worker: int) -> None:
    """Ignore the signals that a scheduler sends to every process of a job.

    A worker that a signal killed would break the step that is to be saved.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def close_loader(loader: DataLoader[Any] | None) -> None:
    """End the workers, which ignore SIGTERM."""
    iterator: Any = loader._iterator if loader is not None else None
    if iterator is None or loader is None or not loader.num_workers:
        return
    workers = iterator._workers
    iterator._shutdown_workers()
    for worker in workers:
        if worker.is_alive():  # it is still making a sample
            worker.kill()
            worker.join()


def _as_it_is(batch: Any) -> Any:
    return batch


def steps_per_epoch(loader: DataLoader[Any]) -> int | None:
    """Steps per epoch of a training loader, or None if epochs have no known length."""
    return len(loader.batch_sampler) if isinstance(loader.batch_sampler, StepSampler) else None


def samples_per_epoch(loader: DataLoader[Any]) -> int | None:
    """Samples of the training dataset, or None if they have not been counted because it is iterable."""
    return loader.batch_sampler.length if isinstance(loader.batch_sampler, StepSampler) else None


def resume_at(loader: DataLoader[Any], epoch: int, step: int) -> None:
    """Make a training loader continue after the first ``step`` steps of an epoch."""
    if isinstance(loader.batch_sampler, StepSampler):
        loader.batch_sampler.resume_at(epoch, step)
    elif isinstance(loader.dataset, StepStream):
        loader.dataset.resume_at(step)


def first_batch(loader: DataLoader[Any]) -> StepBatch:
    """The loader's next batch, made in this process; the state of the loader and its workers does not change."""
    if loader.batch_sampler is None:
        made: StepBatch = next(iter(loader.dataset))
        return made
    numbers: Any = next(iter(loader.batch_sampler))
    batch: StepBatch = loader.collate_fn([loader.dataset[number] for number in numbers])
    return batch
