"""Chooses a stage's program among the candidates of a strategy, by their predicted bytes and seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from runner.memory.solve.adjust import adjusted
from runner.memory.solve.choose import Priced, fastest_that_fits, priced
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ActivationPlan, Price, Program, StageChain, StageChoice
from runner.plan.memory.stage_arena import TURNS
from runner.plan.stages.figures import StageFigures, stage_figures
from runner.plan.stages.on_the_way import OnTheWay
from runner.plan.time.host import seconds_alone

__all__ = ["ProgramChoice", "program_cost", "stage_peak"]


class ProgramChoice:
    """Chooses the programs of a model's stages. It prices the candidates of a stage once, whatever the budget.

    Args:
        to_host: whether saved tensors move to a host's memory that is not the device's.
    """

    def __init__(self, *, to_host: bool = False) -> None:
        self._to_host = to_host
        self._priced: dict[tuple[str, int, int, int, int], tuple[Priced, ...]] = {}

    def __call__(self, chain: StageChain, strategy: Strategy) -> tuple[Program, StageChoice]:
        """The fastest program of a strategy that fits into the stage's budget, or the smallest if none does.

        Args:
            chain: a stage of one and the same profile, with its budget.
            strategy: a strategy that has candidates.
        """
        assert chain.budget_bytes is not None  # nothing is chosen before it is known
        key = strategy.name, chain.first, chain.last, chain.in_flight, chain.saved_at_once
        if key not in self._priced:
            self._priced[key] = self._price(chain, strategy)
        return fastest_that_fits(self._priced[key], chain.budget_bytes)

    def _price(self, chain: StageChain, strategy: Strategy) -> tuple[Priced, ...]:
        assert strategy.candidates is not None  # a strategy that chooses has some
        cost = partial(program_cost, chain, to_host=self._to_host)
        return priced(strategy.candidates(replace(chain, price=cost)), cost)


def program_cost(chain: StageChain, program: Program, *, to_host: bool = False) -> Price:
    """What a stage's program costs: bytes of all its micro-batches in flight, and seconds of one of them.

    Args:
        chain: the stage.
        program: its program.
        to_host: whether saved tensors move to a host's memory that is not the device's.
    """
    figures = _figures(chain, program, to_host=to_host)
    seconds = seconds_alone(figures, chain.in_flight, chain.copy_seconds)
    return Price(stage_peak(figures, chain.in_flight, chain.saved_at_once), seconds, figures.moved_bytes)


def stage_peak(figures: StageFigures, in_flight: int, saved_at_once: int | None = None) -> int:
    """The most bytes of a stage's saved tensors and temporaries, of all its micro-batches in flight.

    Args:
        figures: the stage's figures.
        in_flight: see :class:`runner.memory.solve.values.StageChain`.
        saved_at_once: see :attr:`runner.memory.solve.values.StageChain.saved_at_once`; None = all in flight.
    """
    if figures.moved_bytes:
        return _peak_with_moves(figures, in_flight)
    whole = in_flight if saved_at_once is None else saved_at_once
    left_to_w = min(figures.saved_bytes, figures.deferred_bytes + figures.deferred_input_bytes)
    others = (whole - 1) * figures.saved_bytes + (in_flight - whole) * left_to_w
    of_input = figures.input_backward_peak_bytes if whole < in_flight else 0
    backward = figures.saved_bytes + max(figures.backward_peak_bytes, of_input)
    return others + max(figures.forward_peak_bytes, backward)


def _peak_with_moves(figures: StageFigures, in_flight: int) -> int:
    """The peak of forwards of as many micro-batches as are in flight, and then of backwards and forwards in turns."""
    way, peak, saved = OnTheWay(figures.leaving_bytes), 0, figures.saved_bytes
    for turn in range(2 * in_flight + TURNS):
        if turn >= in_flight:
            peak = max(peak, in_flight * saved + way.backward((0, turn - in_flight), figures.moved))
        held = min(turn, in_flight - 1)
        peak = max(peak, held * saved + way.forward((0, turn), figures.moved))
    return peak


def _figures(chain: StageChain, program: Program, *, to_host: bool) -> StageFigures:
    """The figures of one stage under a program, from rows of this stage alone.

    Those of a divided backward are right only if micro-batches wait for their W, because nobody reads them otherwise.
    """
    waits_for_w = chain.saved_at_once < chain.in_flight
    made = adjusted(chain.profile, ActivationPlan((program,), to_host), divides=waits_for_w)
    behind = chain.profile.layers[chain.last + 1 : chain.last + 2]  # so that the loss is only the last stage's
    before = chain.profile.layers[max(0, chain.first - 1) : chain.first]  # whose output's gradients the stage makes
    rows = replace(made, layers=(*before, *made.layers, *behind))
    (figures,) = stage_figures(rows, [(len(before), len(before) + len(made.layers) - 1)])
    return figures
