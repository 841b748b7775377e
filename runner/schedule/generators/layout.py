"""Common functions of generators: short names for actions, and placements of stages."""

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
    """Stage -> rank if the stages go round all ranks: 0 1 2 0 1 2. With one chunk, stage s is on rank s.

    Source: Narayanan et al., Megatron-LM, 2021.
    """
    return tuple(stage % ranks for stage in range(ranks * chunks))


def zigzag(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage -> rank if every second chunk goes back: 0 1 2 2 1 0; the two stages at a turn are on one rank.

    Source: two chunks are the V of Qi et al., 2024; more are the waves of Liu et al., Hanayo, 2023.
    """
    down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return tuple(rank for chunk in range(chunks) for rank in (up if chunk % 2 else down))


def of_one_pipeline(
    name: str,
    placement: Sequence[int],
    rows: Iterable[Iterable[Action]],
    microbatches: int,
    sizes: Sequence[float] | None = None,
) -> Schedule:
    """Make a schedule from each rank's list; all micro-batches go through the same stages.

    Args:
        name: name of the schedule.
        placement: stage -> rank, with the same number of stages on each rank.
        rows: for each rank, its compute in order.
        microbatches: number of micro-batches of one optimizer step.
        sizes: the share of each in the samples; None: all have as many.
    """
    actions = tuple(tuple(row) for row in rows)
    return Schedule(
        name=name,
        placement=(tuple(placement),),
        pipeline_of_microbatch=(0,) * microbatches,
        actions=actions,
        chunks=len(placement) // len(actions),
        sizes=tuple(sizes or ()),
    )


def forward(stage: int, microbatch: int) -> Action:
    """The action F of one stage and micro-batch."""
    return Action(Op.F, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """The action B of one stage and micro-batch."""
    return Action(Op.B, stage, microbatch)


def input_gradient(stage: int, microbatch: int) -> Action:
    """The action I of one stage and micro-batch."""
    return Action(Op.I, stage, microbatch)


def weight_gradient(stage: int, microbatch: int) -> Action:
    """The action W of one stage and micro-batch."""
    return Action(Op.W, stage, microbatch)
