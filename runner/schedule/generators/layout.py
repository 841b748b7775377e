"""What generators share: actions by short names, and where the stages live."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.schedule.values import Action, Op, Schedule

__all__ = [
    "backward",
    "forward",
    "input_gradient",
    "looping",
    "of_one_pipeline",
    "weight_gradient",
    "zigzag",
]


def looping(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage -> rank where the stages go round: 0 1 2 0 1 2. With one chunk: stage s on rank s.

    Source: Narayanan et al., Megatron-LM, 2021.
    """
    return tuple(stage % ranks for stage in range(ranks * chunks))


def zigzag(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage -> rank where every other chunk runs back: 0 1 2 2 1 0; the stages at a turn are on one rank.

    Source: two chunks are the V of Qi et al., 2024; more are the waves of Liu et al., Hanayo, 2023.
    """
    down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return tuple(rank for chunk in range(chunks) for rank in (up if chunk % 2 else down))


def of_one_pipeline(
    name: str, placement: Sequence[int], rows: Iterable[Iterable[Action]], microbatches: int
) -> Schedule:
    """The schedule of each rank's list, all micro-batches going through the same stages.

    Args:
        name: of the schedule.
        placement: stage -> rank, as many stages on each.
        rows: per rank, its compute in order.
        microbatches: of one optimizer step.
    """
    actions = tuple(tuple(row) for row in rows)
    return Schedule(
        name=name,
        placement=(tuple(placement),),
        pipeline_of_microbatch=(0,) * microbatches,
        actions=actions,
        chunks=len(placement) // len(actions),
    )


def forward(stage: int, microbatch: int) -> Action:
    """F of one stage and micro-batch."""
    return Action(Op.F, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """B of one stage and micro-batch."""
    return Action(Op.B, stage, microbatch)


def input_gradient(stage: int, microbatch: int) -> Action:
    """I of one stage and micro-batch."""
    return Action(Op.I, stage, microbatch)


def weight_gradient(stage: int, microbatch: int) -> Action:
    """W of one stage and micro-batch."""
    return Action(Op.W, stage, microbatch)
