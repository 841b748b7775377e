"""Finds micro-batches of one sample among larger ones, and how a request comes to have none of them.

Such a micro-batch is another case for some code than all others: a batch norm has one value per channel, and
``squeeze`` takes the batch's axis away.
"""

from __future__ import annotations

from runner.config.schema import RunConfig
from runner.plan.layout.batches import microbatch_sizes

__all__ = ["has_single", "last_step", "with_two_samples"]


def has_single(config: RunConfig, samples: int) -> bool:
    """Whether a step of so many samples has a micro-batch of one."""
    data = config.parallelism.data
    return any(1 in microbatch_sizes(samples, data, replica, config.schedule.parts) for replica in {0, data - 1})


def last_step(config: RunConfig, samples: int) -> int:
    """How many samples the last step of an epoch has, if it has fewer than the others and the run comes to it; else 0.

    Args:
        config: the request.
        samples: their number in the training set.
    """
    size, trainer = config.data.batch_size, config.trainer
    if config.data.drop_last or samples < size:
        return 0
    comes = trainer.max_epochs is not None or trainer.max_steps > samples // size
    return samples % size if comes else 0


def with_two_samples(config: RunConfig, samples: int) -> str:
    """An override with which no micro-batch of a step has one sample; empty if there is none.

    Args:
        config: the request.
        samples: their number in a step.
    """
    degrees, parts = config.parallelism, config.schedule.parts
    if not isinstance(parts, int):
        return "schedule.shares=null"
    most = samples // degrees.data // 2
    if parts > 1 and most >= max(1, degrees.pipeline):
        return f"schedule.microbatches={most}"
    return f"data.batch_size={2 * degrees.data * parts}" if samples == config.data.batch_size else ""
