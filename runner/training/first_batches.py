"""Opens the data of a request as its run will, before a run exists.

What a rank would refuse at its start, or at the first validation, is refused here: samples that do not load,
metrics that have nothing to measure, a callback that follows what nobody logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.model.data import Collate, checked_batch, is_promised, load_datasets
from runner.model.metrics import metric_problems
from runner.model.seeds import seeded
from runner.model.targets import explained
from runner.plan.layout.batches import largest_microbatch
from runner.profiling.meet import Batch
from runner.profiling.model import telling_model_problems
from runner.reads import hearing

__all__ = ["FirstBatches", "first_batches"]

_MOST_SAMPLES = 64


@dataclass(frozen=True)
class FirstBatches:
    """The first micro-batches, input and target, of the sets of a request.

    Args:
        training: None if the data has a ``spec``: it may not be there yet, and is left to the ranks.
        validation: None if there is no such set.
        samples: how many the training set has, or None if they are not counted.
    """

    training: Batch | None
    validation: Batch | None
    samples: int | None = None

    def notes(self, batch_size: int) -> list[str]:
        """A line if the training set has fewer samples than a step asks for, and is planned with."""
        if self.samples is None or self.samples >= batch_size:
            return []
        return [
            f"the training set has {self.samples} samples, and no step takes more: memory and time are planned for "
            f"data.batch_size={batch_size}, and are less"
        ]


def first_batches(config: RunConfig) -> FirstBatches:
    """Load the first samples of each set of a request.

    Raises:
        RequestError: a rank would refuse the data, a metric or what a callback monitors.
    """
    with telling_model_problems(config), hearing():
        if is_promised(config.data):
            return FirstBatches(None, None)
        datasets = load_datasets(config.data, config.seed)
        has_validation = datasets.validation is not None
        raise_problems(metric_problems(config, has_validation=has_validation))
        if config.loss.name != "auto":  # else it may be a LightningModule, which logs what it wants
            raise_problems(_monitor_problems(config, validates=has_validation))
        data, parts = config.data, config.schedule.parts
        count = min(max(1, largest_microbatch(data.batch_size, config.parallelism.data, parts)), _MOST_SAMPLES)
        with seeded(config.seed, "first batches"):
            training = _first_batch(config, datasets.train, datasets.collate, count, "samples")
            samples = None if datasets.streams else len(datasets.train)
            if not has_validation:
                return FirstBatches(training, None, samples)
            collate, named = datasets.validation_collate, "samples for validation"
            validation = _first_batch(config, datasets.validation, collate, count, named)
            return FirstBatches(training, validation, samples)


def _monitor_problems(config: RunConfig, *, validates: bool) -> Iterator[Problem]:
    if config.callbacks:
        from runner.training.users_callbacks import build_callbacks, monitor_problems

        yield from monitor_problems(config, build_callbacks(config), validates=validates)


def _first_batch(config: RunConfig, dataset: Any, collate: Collate, count: int, named: str) -> Batch:
    """The batch of the first samples of a set; ``named`` is what messages call them."""
    samples: list[Any] = []
    try:
        if isinstance(dataset, IterableDataset):
            samples += islice(iter(dataset), count)
        else:
            for number in range(min(count, len(dataset))):
                samples.append(dataset[number])
    except Exception as error:
        why = f"Sample {len(samples)} raised {explained(error)}"
        raise RequestError([Problem("data.target", config.data.target, f"must have {named} that load", why)]) from error
    if not samples:
        raise RequestError(
            [
                Problem(
                    "data.target", config.data.target, f"must have at least one sample{named.removeprefix('samples')}"
                )
            ]
        )
    return checked_batch(samples, collate, config.data, named)
