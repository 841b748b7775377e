"""Epochs as optimizer steps: ``trainer.max_epochs`` and ``data.drop_last``."""

from __future__ import annotations

from dataclasses import replace

from runner.config.rules.learning_rate import LEARNING_RATE
from runner.config.schema import DataConfig, RunConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.model.data import load_datasets

__all__ = ["count_epoch_samples", "epochs_said", "in_steps", "num_steps"]


def num_steps(samples: int, data: DataConfig) -> int:
    """The steps of an epoch: the last one may be smaller, and is left out with ``data.drop_last``."""
    return samples // data.batch_size if data.drop_last else -(-samples // data.batch_size)


def in_steps(config: RunConfig, samples: int | None) -> RunConfig:
    """The request whose ``trainer.max_steps`` are the steps of ``trainer.max_epochs``; the same one without epochs.

    Args:
        config: the request.
        samples: number of training samples; None for an iterable dataset.

    Raises:
        RequestError: the samples are not counted, or the learning rate would change after the last step.
    """
    epochs = config.trainer.max_epochs
    if epochs is None:
        return config
    if samples is None:
        rule = "needs a dataset whose samples are counted"
        why = "An iterable dataset is one endless epoch"
        raise RequestError([Problem("trainer.max_epochs", epochs, rule, why, "trainer.max_steps=100")])
    steps = epochs * num_steps(samples, config.data)
    by_steps = replace(config, trainer=replace(config.trainer, max_epochs=None, max_steps=steps))
    raise_problems(LEARNING_RATE.problems(by_steps))
    return replace(config, trainer=replace(config.trainer, max_steps=steps))


def count_epoch_samples(config: RunConfig) -> int | None:
    """The number of training samples, for which the user's data function is called; None for an iterable dataset.

    Raises:
        RequestError: see :func:`runner.model.data.load_datasets`.
    """
    datasets = load_datasets(config.data, config.seed)
    return None if datasets.streams else len(datasets.train)


def epochs_said(config: RunConfig, samples: int | None) -> str:
    """How many steps the epochs of a request are, in words; ``config`` comes from :func:`in_steps`."""
    count, steps, size = config.trainer.max_epochs, config.trainer.max_steps, config.data.batch_size
    return f"{count} epoch{'s' if count != 1 else ''} of {samples} samples, {size} a step: {steps} steps"
