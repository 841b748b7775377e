"""Batches by optimizer step from an iterable dataset: step k takes the next B samples of its order.

Every rank that loads data reads the whole dataset and takes its own part, so that all agree. When the dataset ends, it
starts again under the seed of the next epoch; the last step before that may be short. Lightning sees one endless epoch:
only ranks with the first or the last stage notice the end of the data, and the others need not be told.

A dataset that has ``state_dict`` and ``load_state_dict`` is asked for its state after each step
(:mod:`runner.training.data.places`), so that a resumed run reads no sample again. For any other one a resumed run reads
all samples before its place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from runner.engine.window import StepBatch
from runner.plan.layout.batches import replica_slice
from runner.training.data.batches import Batches
from runner.training.data.places import Place
from runner.training.data.samples import Samples, why_not_at

__all__ = ["EmptySteps", "Share", "SizedStream", "StepStream", "count_samples"]


@dataclass(frozen=True)
class Share:
    """The part of a step's ``batch_size`` samples that replica number ``replica`` out of ``data`` takes."""

    batch_size: int
    data: int
    replica: int


class StepStream(IterableDataset[StepBatch]):
    """The steps of one replica.

    With several loader workers, each reads the whole dataset and makes every n-th step. The order is the same, but each
    worker pays the cost of making every sample.

    Args:
        dataset: iterable more than once; if it has ``set_epoch``, it is told the epoch.
        batches: makes batches from samples.
        share: which samples this replica takes.
        seed: seeds the random generators of a sample, together with the epoch and the sample's position in it.
        check_every: steps between two comparisons of whole batches.
        endless: whether to start again when the dataset ends.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batches: Batches,
        share: Share,
        *,
        seed: int,
        check_every: int,
        endless: bool,
    ) -> None:
        self._dataset, self._batches, self._share = dataset, batches, share
        self._seed, self._check_every, self._endless = seed, check_every, endless
        self._first = 0
        self._place: Place | None = None
        self._worker = (0, 1)

    def resume_at(self, step: int, place: Place | None) -> str:
        """Start after the first ``step`` steps, at ``place`` if that is given and good, else by reading their samples.

        Returns:
            why the place is not good; empty if it is, or if there is none.
        """
        why = why_not_at(place, self._dataset, self._seed, self._batches.checksum) if place is not None else ""
        self._first, self._place = step, None if why else place
        return why

    def __iter__(self) -> Iterator[StepBatch]:
        number, workers = self._own_worker()
        share, samples = self._share, self._samples()
        step = self._first if self._place is not None else 0
        while taken := samples.take(share.batch_size):
            if step >= self._first and (step - self._first) % workers == number:
                yield self._batch(step, taken, samples)
            step += 1

    def _samples(self) -> Samples:
        return Samples(self._dataset, self._seed, endless=self._endless, place=self._place)

    def _batch(self, step: int, taken: list[Any], samples: Samples) -> StepBatch:
        own = taken[replica_slice(len(taken), self._share.data, self._share.replica)]
        whole = step == self._first or step % self._check_every == 0
        made = self._batches.of(own, lambda: taken[0], step=(0, step), whole=whole)
        made.place = samples.place(step + 1, self._batches.checksum) if self._endless else None
        return made

    def _own_worker(self) -> tuple[int, int]:
        """This worker's number and the number of workers.

        From then on, the dataset cannot see them: it would leave out samples that it takes for another worker's part.
        """
        info = get_worker_info()
        if info is not None:  # on the first pass in this worker; the copy in the main process has no number
            self._worker = info.id, info.num_workers
            torch_worker._worker_info = None
            self._dataset = _with_own_epoch(self._dataset)
        return self._worker


def _with_own_epoch(dataset: IterableDataset[Any]) -> IterableDataset[Any]:
    """The dataset for one loader worker; those that are told their epoch may hold it in memory that workers share.

    Hugging Face's do, so that a worker ahead of the others would change the order of what they still read.
    """
    if not callable(getattr(dataset, "set_epoch", None)):
        return dataset
    try:
        return copy.deepcopy(dataset)
    except Exception:  # of a user's code, which then holds what belongs to this process alone
        return dataset


class SizedStream(StepStream):
    """One pass through a dataset of known length; Lightning's loops must see a length on all ranks or on none."""

    def __init__(self, *args: Any, length: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, endless=False)
        self._length = length

    def __len__(self) -> int:
        return -(-self._length // self._share.batch_size)


class EmptySteps(IterableDataset[StepBatch]):
    """Endless empty steps, for a rank that loads nothing."""

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            yield StepBatch()


def count_samples(dataset: Any) -> int:
    """Number of samples in a finite dataset; an iterable one without a length is read once to count them."""
    return len(dataset) if hasattr(dataset, "__len__") else sum(1 for _ in dataset)
