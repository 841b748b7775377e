"""A note about a request with more micro-batches or replicas than samples, which is right but seldom meant."""

from __future__ import annotations

from runner.config.schema import RunConfig
from runner.plan.layout.batches import split_sizes

__all__ = ["empty_microbatch_notes"]


def empty_microbatch_notes(config: RunConfig) -> tuple[str, ...]:
    """One line if some replicas or micro-batches never have a sample, although they do all that others do."""
    spare = config.parallelism.data - config.data.batch_size
    if spare > 0:
        shared = f"a step has {config.data.batch_size} samples for {config.parallelism.data} replicas"
        return (f"{shared}: {spare} of them never {'get' if spare > 1 else 'gets'} one",)
    samples = split_sizes(config.data.batch_size, config.parallelism.data)[0]
    microbatches = config.schedule.computed_microbatches
    if microbatches <= samples:
        return ()
    taken = f"a replica computes {microbatches} micro-batches a step, and takes at most {samples} samples"
    return (f"{taken}: {microbatches - samples} micro-batches are always empty",)
