"""Rules of micro-batches that have shares of their own in a step's samples."""

from __future__ import annotations

from runner.config.rules.table import Row, Table
from runner.plan.layout.batches import microbatch_sizes
from runner.plan.rules.facts import OrderFacts

__all__ = ["SHARES"]


def _leaves_one_empty(facts: OrderFacts) -> bool:
    """Whether a micro-batch of the replica with fewest samples gets none."""
    config = facts.config
    data, shares = config.parallelism.data, config.schedule.option("shares")
    return shares is not None and min(microbatch_sizes(config.data.batch_size, data, data - 1, shares)) == 0


def _none_moved(part: str) -> Row[OrderFacts]:
    """The rule that nothing moves to the host's memory."""
    return Row(
        f"offload.{part}",
        lambda f: getattr(f.config.offload, part) != "none",
        "must be none with schedule.shares",
        "What moves to the host's memory is planned for micro-batches of one size",
        fix=f"offload.{part}=none",
    )


SHARES: Table[OrderFacts] = Table(
    "Micro-batches with shares of their own",
    (
        Row(
            "data.batch_size",
            _leaves_one_empty,
            "must have a sample for each of the shares in schedule.shares",
            "A share is rounded to whole samples, and one of a replica would have none",
            fix="schedule.shares=null",
        ),
        _none_moved("activations"),
        _none_moved("weights"),
    ),
    applies=lambda f: f.config.schedule.option("shares") is not None,
)
