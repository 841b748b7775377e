"""The time in which stages move saved tensors to the host's memory and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.plan.stages.figures import StageFigures
from runner.plan.values import Link
from runner.schedule.simulation.host_link import HostLink, StageMoves, shares

__all__ = ["seconds_alone", "stage_moves"]

_ROUNDS = 3  # micro-batches beyond those in flight, until a stage's link is as busy as it will be
_ROUNDING = 1e-9  # shorter waits, as parts of the whole, are errors of sums


def stage_moves(figures: Sequence[StageFigures], ratio: float, host_link: Link) -> tuple[StageMoves, ...]:
    """What each stage moves to the host's memory; empty if none moves anything.

    Args:
        figures: the figures of each stage.
        ratio: samples of a mean micro-batch, divided by those of the figures.
        host_link: see :func:`runner.plan.time.predict.predict_time`.
    """
    if not any(stage.moved_bytes for stage in figures):
        return ()
    return tuple(_moves(stage, ratio, host_link.seconds) for stage in figures)


def seconds_alone(stage: StageFigures, in_flight: int, copy_seconds: Callable[[float], float]) -> float:
    """The mean seconds of a micro-batch's forward and backward if the stage has its rank and never waits for others.

    Forwards of as many micro-batches as are in flight come first, then backwards and forwards in turns.

    Args:
        stage: the figures of the stage.
        in_flight: the largest number of micro-batches whose saved tensors are alive at once.
        copy_seconds: see :class:`runner.memory.solve.values.StageChain`.
    """
    if not stage.moved_bytes:
        return stage.seconds
    moves, count = _moves(stage, 1.0, copy_seconds), in_flight + _ROUNDS
    host, now = HostLink([moves]), 0.0
    for turn in range(count + in_flight):
        if turn >= in_flight:
            of = (0, turn - in_flight)
            now = host.backward(of, moves, now, now, stage.backward_seconds, all_at_once=False)
        if turn < count:
            now = host.forward((0, turn), moves, now, now, stage.forward_seconds)
    waited = host.waited / count
    return stage.seconds + (waited if waited > _ROUNDING * stage.seconds else 0.0)


def _moves(stage: StageFigures, ratio: float, copy_seconds: Callable[[float], float]) -> StageMoves:
    return StageMoves(
        forward=shares([layer.forward_seconds for layer in stage.moved]),
        backward=shares([layer.backward_seconds for layer in stage.moved]),
        sizes=tuple(layer.num_bytes * ratio for layer in stage.moved),
        copying=tuple(copy_seconds(layer.num_bytes * ratio) for layer in stage.moved),
        one_by_one=frozenset(at for at, layer in enumerate(stage.moved) if layer.moves.one_by_one),
        needs=tuple(layer.moves.needs for layer in stage.moved),
        first=stage.first,
    )
