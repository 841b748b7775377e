"""Batches by optimizer step: step k takes samples [kB, (k+1)B) of the seeded order, whatever the layout.

A sample is drawn under random generators seeded from (seed, epoch, its number): a dataset that augments at random
gives the same sample to the first and to the last stage, to any number of workers, and after a resume.

Only ranks with the first or the last stage load data. The others get batches that know nothing but their number;
sizes reach them with the pipeline's header.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from runner.engine.window import StepBatch
from runner.errors import RunFailedError
from runner.model.layers import mix_seed
from runner.plan.batches import replica_slice
from runner.training.random_state import seeded

__all__ = ["SampleNumber", "StepSampler", "first_batch", "make_loader"]

SampleNumber = tuple[int, int]
"""Epoch, and number in the dataset."""


class StepSampler(Sampler[list[SampleNumber]]):
    """The sample numbers of one replica, step by step; every epoch in its own seeded order.

    The last step of an epoch may be short. A replica may get no sample of it.

    Args:
        length: samples of the dataset.
        batch_size: of a step, over all replicas.
        data, replica: degree and place on the data axis.
        shuffle: else the dataset's own order.
        seed: with the epoch, it gives the order.

    Attributes:
        epoch: the epoch that the next iteration goes through.
    """

    def __init__(self, length: int, batch_size: int, *, data: int, replica: int, shuffle: bool, seed: int) -> None:
        self.length = length
        self.batch_size = batch_size
        self.epoch = 0
        self._resumed = (0, 0)
        self._data, self._replica, self._shuffle, self._seed = data, replica, shuffle, seed

    @property
    def sampler(self) -> StepSampler:
        """Where Lightning looks for :meth:`set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def resume_at(self, epoch: int, step: int) -> None:
        """Start ``epoch`` after its first ``step`` steps; later epochs are whole."""
        self.epoch = epoch
        self._resumed = (epoch, step)

    def __len__(self) -> int:
        """Steps of a whole epoch."""
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
    """A dataset whose samples are drawn under generators of their own, by :data:`SampleNumber`."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: SampleNumber) -> Any:
        with seeded(self._seed, *number):
            return self._dataset[number[1]]


class _Collate:
    """Samples of a replica to a :class:`StepBatch` with what the rank needs."""

    def __init__(self, dataset: _SeededSamples, inputs: bool, targets: bool) -> None:
        self._dataset, self._inputs, self._targets = dataset, inputs, targets

    def __call__(self, samples: Sequence[Any]) -> StepBatch:
        given = samples if samples else [self._dataset[0, 0]]
        inputs, targets = default_collate([_pair(sample) for sample in given])
        if not samples:  # a replica without samples keeps the shapes
            inputs, targets = _none_of(inputs), _none_of(targets)
        return StepBatch(inputs if self._inputs else None, targets if self._targets else None, len(samples))


def _pair(sample: Any) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise RunFailedError(f"a sample of the dataset must be (input, target), not a {type(sample).__name__}")
    return sample[0], sample[1]


def _none_of(value: Any) -> Any:
    from runner.model.boundary import map_tensors

    return map_tensors(lambda tensor: tensor[:0], value)


class _NumbersOnly(Dataset[Any]):
    """A dataset whose samples do not matter."""

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
    length: int,
    *,
    batch_size: int,
    data: int,
    replica: int,
    inputs: bool,
    targets: bool,
    shuffle: bool,
    seed: int,
    workers: int = 0,
) -> DataLoader[Any]:
    """The loader of one rank.

    Args:
        dataset: None on a rank that loads nothing.
        length: samples of the dataset, known to every rank.
        batch_size: samples of a step over all replicas.
        inputs, targets: whether this rank has the first or the last stage.
    """
    sampler = StepSampler(length, batch_size, data=data, replica=replica, shuffle=shuffle, seed=seed)
    if dataset is None:
        return DataLoader(_NumbersOnly(length), batch_sampler=sampler, collate_fn=_know_nothing)
    generator = torch.Generator().manual_seed(mix_seed(seed, 0x10AD))  # the loader's own draws are not the model's
    samples = _SeededSamples(dataset, mix_seed(seed, 0x5A3B))
    return DataLoader(
        samples,
        batch_sampler=sampler,
        collate_fn=_Collate(samples, inputs, targets),
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=generator,
    )


def first_batch(loader: DataLoader[Any]) -> StepBatch:
    """The loader's next batch, made here: its workers and its place stay as they are."""
    assert loader.batch_sampler is not None
    numbers: Any = next(iter(loader.batch_sampler))
    batch: StepBatch = loader.collate_fn([loader.dataset[number] for number in numbers])
    return batch
