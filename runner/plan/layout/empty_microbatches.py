"""A note about a request with more micro-batches than samples, which is right but seldom meant."""

from __future__ import annotations

from runner.config.schema import RunConfig
from runner.plan.layout.batches import split_sizes

__all__ = ["empty_microbatch_notes"]


def empty_microbatch_notes(config: RunConfig) -> tuple[str, ...]:
    """One line if some micro-batches never have a sample, although their actions run and their messages are sent."""
    samples = split_sizes(config.data.batch_size, config.parallelism.data)[0]
    microbatches = config.schedule.computed_microbatches
    if microbatches <= samples:
        return ()
    taken = f"a replica computes {microbatches} micro-batches a step, and takes at most {samples} samples"
    return (f"{taken}: {microbatches - samples} micro-batches are always empty",)
