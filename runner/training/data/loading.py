"""Batches by optimizer step: step k takes samples [kB, (k+1)B) of the seeded order, whatever the layout.

Each sample is drawn under random generators seeded from (seed, epoch, sample number). A dataset with random
augmentation therefore gives the same sample to the first and to the last stage, for any number of workers and after a
resume. For data that draws from a generator of its own this is not so: every batch carries a checksum, which the ranks
of a pipeline compare.

Only ranks with the first or the last stage load data. The other ranks get batches that hold nothing but their number;
sizes reach them with the pipeline's header.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from runner.config.schema import RunConfig
from runner.engine.window import StepBatch
from runner.model.data import Collate
from runner.model.seeds import keep_generators, mix_seed, seed_generators
from runner.parent import end_with
from runner.plan.layout.batches import replica_slice
from runner.training.data.batches import Batches
from runner.training.data.places import Place
from runner.training.data.streams import EmptySteps, Share, SizedStream, StepStream
from runner.training.data.timed import TimedLoader

__all__ = [
    "StepNumbers",
    "StepSampler",
    "close_loader",
    "few_samples_note",
    "no_validation_note",
    "first_batch",
    "make_loader",
    "resume_at",
    "samples_of_step",
    "samples_per_epoch",
    "steps_per_epoch",
    "timed_first_batch",
]


@dataclass(frozen=True)
class StepNumbers:
    """The samples of one replica's step.

    Args:
        epoch: the epoch.
        step: the step's number in the epoch.
        samples: their numbers in the dataset.
        whole: whether the ranks that load the step compare all of its samples.
    """

    epoch: int
    step: int
    samples: tuple[int, ...]
    whole: bool


class StepSampler(Sampler[Any]):  # torch's own annotations want lists of numbers
    """The sample numbers of one replica, step by step; every epoch has its own seeded order.

    The last step of an epoch may be short, and a replica may get no sample of it.

    Args:
        length: number of samples in the dataset.
        batch_size: samples per step, over all replicas.
        data, replica: data-parallel degree, and the number of this replica.
        shuffle: whether to shuffle; else samples come in the order of the dataset.
        seed: determines the order, together with the epoch.
        check_every: steps between two comparisons of all samples of a step; the first one after a start is always
            compared.
        drop_last: whether an epoch ends before a step that would be short.

    Attributes:
        epoch: the epoch of the next iteration.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        data: int,
        replica: int,
        shuffle: bool,
        seed: int,
        check_every: int = 100,
        drop_last: bool = False,
    ) -> None:
        self.length = length
        self.drop_last = drop_last
        self.batch_size = batch_size
        self.epoch = 0
        self._resumed = (0, 0)
        self._data, self._replica, self._shuffle, self._seed = data, replica, shuffle, seed
        self._check_every = check_every

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
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def __iter__(self) -> Iterator[StepNumbers]:
        epoch, order = self.epoch, self._order()
        first = self._resumed[1] if epoch == self._resumed[0] else 0
        for number in range(first, len(self)):
            step = order[number * self.batch_size : (number + 1) * self.batch_size]
            own = tuple(step[replica_slice(len(step), self._data, self._replica)])
            yield StepNumbers(epoch, number, own, self._is_compared(epoch, number))

    def _is_compared(self, epoch: int, step: int) -> bool:
        number, first = (each[0] * len(self) + each[1] for each in ((epoch, step), self._resumed))
        return number == first or number % self._check_every == 0

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(mix_seed(self._seed, self.epoch))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


class _Steps(Dataset[StepBatch]):
    """The steps of a map-style dataset, each sample drawn under its own random generators.

    A loader calls ``__getitems__`` with what its sampler yields; it does not call ``__getitem__``.
    """

    def __init__(self, dataset: Any, batches: Batches, seed: int) -> None:
        self._dataset, self._batches, self._seed = dataset, batches, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, step: StepNumbers) -> StepBatch:
        restore = keep_generators()  # once, because it takes longer than to seed them
        try:
            samples = [self._sample(step.epoch, number) for number in step.samples]
        finally:
            restore()
        place = (step.epoch, step.step)
        return self._batches.of(samples, lambda: self._sample(0, 0), step=place, whole=step.whole)

    def _sample(self, epoch: int, number: int) -> Any:
        seed_generators(mix_seed(self._seed, epoch, number))
        return self._dataset[number]


class _NoSteps(Dataset[StepBatch]):
    """The steps of a rank that needs no data."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, step: StepNumbers) -> StepBatch:
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
    check_every: int = 100,
    drop_last: bool = False,
    collate: Collate = default_collate,
) -> TimedLoader:
    """Make the data loader of one rank.

    Args:
        dataset: None on a rank that loads nothing.
        length: number of samples, known to every rank; None for an iterable dataset, which restarts when it ends.
        batch_size: samples of a step over all replicas.
        inputs, targets: whether this rank has the first or the last stage.
        check_every: steps between two comparisons of all samples of a step; the first and the last one of a step are
            always compared.
        drop_last: see :class:`StepSampler`; not for an iterable dataset.
        collate: samples to a batch ``(input, target)``.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, 0x10AD))  # separate from the model's random numbers
    batches = Batches(collate, inputs=inputs, targets=targets, seed=mix_seed(seed, "collate"))
    sample_seed = mix_seed(seed, 0x5A3B)
    common: dict[str, Any] = {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "generator": generator,
        "worker_init_fn": partial(_begin_worker, seed) if workers else None,
    }
    if isinstance(dataset, IterableDataset):
        share = Share(batch_size, data, replica)
        stream = _stream_of(dataset, batches, share, length, seed=sample_seed, check_every=check_every)
        return TimedLoader(stream, batch_size=None, collate_fn=_as_it_is, **common)
    if length is None:
        return TimedLoader(EmptySteps(), batch_size=None, collate_fn=_as_it_is, generator=generator)
    sampler = StepSampler(
        length,
        batch_size,
        data=data,
        replica=replica,
        shuffle=shuffle,
        seed=seed,
        check_every=check_every,
        drop_last=drop_last,
    )
    if dataset is None:
        return TimedLoader(_NoSteps(length), batch_sampler=sampler, collate_fn=_as_it_is, generator=generator)
    steps = _Steps(dataset, batches, sample_seed)
    return TimedLoader(steps, batch_sampler=sampler, collate_fn=_as_it_is, **common)


def _stream_of(
    dataset: IterableDataset[Any], batches: Batches, share: Share, length: int | None, *, seed: int, check_every: int
) -> StepStream:
    """The steps of an iterable dataset, which restarts when it ends if its length is not known."""
    if length is None:
        return StepStream(dataset, batches, share, endless=True, seed=seed, check_every=check_every)
    return SizedStream(dataset, batches, share, length=length, seed=seed, check_every=check_every)


def _begin_worker(seed: int, worker: int) -> None:
    """Seed a worker's generators, let it end with its rank, and ignore a scheduler's signals to all processes of a job.

    torch's worker looks for its parent, too, but not while it makes a sample, and never if the rank was killed just
    after it had begun the worker: then the worker takes whoever is its parent by then for the rank.

    Samples and batches are seeded one by one; this seed is for what the user's code draws besides, such as in a thread.
    A worker that a signal killed would break the step that is to be saved.
    """
    rank = multiprocessing.parent_process()
    if rank is not None and rank.pid is not None:
        end_with(rank.pid)
    seed_generators(mix_seed(seed, "worker", worker))
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


def few_samples_note(loader: DataLoader[Any], batch_size: int) -> str | None:
    """A line if the training dataset has fewer samples than a step asks for, so that no step has as many."""
    samples = samples_per_epoch(loader)
    if samples is None or samples >= batch_size:
        return None
    return f"a step takes {samples} samples, because the training set has no more: data.batch_size is {batch_size}"


def no_validation_note(loader: DataLoader[Any] | None, config: RunConfig) -> str | None:
    """A line if validations are asked for and there is nothing to validate on, so that there are none."""
    if loader is not None or config.trainer.val_every is None:
        return None
    asked = f"trainer.val_every={config.trainer.val_every}"
    return f"{asked} is not read: {config.data.target} returns no validation set, or the model has no validation_step"


def samples_of_step(loader: DataLoader[Any], batch_size: int, batch: int) -> int:
    """Samples of all replicas in a batch, by its number from the beginning of the run, from 0.

    The last batch of an epoch may have fewer than ``batch_size``. For an iterable dataset, which is not counted, it is
    taken for a whole one.
    """
    samples, steps = samples_per_epoch(loader), steps_per_epoch(loader)
    if samples is None or not steps:
        return batch_size
    return min(batch_size, samples - batch % steps * batch_size)


def resume_at(loader: DataLoader[Any], epoch: int, step: int, place: Place | None = None) -> str:
    """Make a training loader continue after the first ``step`` steps of an epoch.

    Args:
        place: the same place in an iterable dataset, as its own state; without it, the samples before are read again.

    Returns:
        why the place is not used; empty if it is, or if there is none.
    """
    if isinstance(loader.batch_sampler, StepSampler):
        loader.batch_sampler.resume_at(epoch, step)
    if not isinstance(loader.dataset, StepStream):
        return ""
    why = loader.dataset.resume_at(step, place)
    if place is not None and not why and isinstance(loader, TimedLoader):
        loader.note(place)
    return why


def first_batch(loader: DataLoader[Any]) -> StepBatch:
    """The loader's next batch, made in this process; the state of the loader and its workers does not change."""
    if loader.batch_sampler is None:
        made: StepBatch = next(iter(loader.dataset))
        return made
    return _made(loader, next(iter(loader.batch_sampler)))


def timed_first_batch(loader: DataLoader[Any]) -> tuple[StepBatch, float]:
    """The loader's next batch as :func:`first_batch`, and the seconds for which a step will wait for one.

    The batch after it is timed, as a first one may open files. All ranks make as many, so that a generator of the
    dataset's own is as far on each. What workers make, they make while steps before it are taken. A stream is not read
    again, and its batches count as there.
    """
    batch = first_batch(loader)
    if loader.num_workers or loader.batch_sampler is None:
        return batch, 0.0
    *_, numbers = islice(loader.batch_sampler, 2)
    begun = time.perf_counter()
    _made(loader, numbers)
    return batch, time.perf_counter() - begun


def _made(loader: DataLoader[Any], numbers: Any) -> StepBatch:
    """A batch of samples that have numbers, made in this process."""
    steps: Any = loader.dataset
    made: StepBatch = steps.__getitems__(numbers)
    return made
