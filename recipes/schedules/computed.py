"""What needs no machine: closed forms and the simulator, in units of a rank's share of a forward."""

from __future__ import annotations

from dataclasses import dataclass

from runner.recipes.schedules.rows import Row
from runner.schedule.catalogue.registry import SPECS
from runner.schedule.simulation.clock import Costs, simulate
from runner.schedule.steady import period

__all__ = ["COSTS", "Computed", "compute", "peak_of_formula"]

COSTS = Costs()  # F = I = W = 1, B = 2, messages free


@dataclass(frozen=True)
class Computed:
    """One schedule on paper.

    Args:
        formula: bubble ratio of one flushed step by its closed form; None where there is none, or it does not hold.
        simulated: by playing the order.
        simulated_in_a_row: of steps that run into each other, without a barrier in between; where stages have twins,
            which wait for each other at every step, the same as with it.
        formula_activations: micro-batches of a rank's whole share held at once, by rank; None like ``formula``.
        simulated_activations: the same by playing the order.
        busy: time under compute, mean over the ranks.
    """

    formula: float | None
    simulated: float
    simulated_in_a_row: float
    formula_activations: tuple[float, ...] | None
    simulated_activations: tuple[float, ...]
    busy: float

    @property
    def gains_in_a_row(self) -> bool:
        """Whether steps without a barrier idle less than flushed ones."""
        return self.simulated_in_a_row < self.simulated - 1e-9


def compute(row: Row, ranks: int, microbatches: int) -> Computed:
    """Closed forms and simulation of a row."""
    schedule = row.build(ranks, microbatches)
    played = simulate(schedule, COSTS)
    busy = sum(played.busy) / (ranks * schedule.windows // schedule.interval)
    several = len(schedule.rows) > 1
    return Computed(
        formula=_bubble_of_formula(row, ranks, microbatches),
        simulated=played.bubble_ratio,
        simulated_in_a_row=played.bubble_ratio if several else 1.0 - busy / period(schedule, COSTS),
        formula_activations=peak_of_formula(row, ranks, microbatches),
        simulated_activations=played.peak_activations,
        busy=busy,
    )


def peak_of_formula(row: Row, ranks: int, microbatches: int) -> tuple[float, ...] | None:
    """Micro-batches of its whole share that each rank holds, by the closed form where it holds."""
    if SPECS[row.schedule].formulas is None or not _value("when", row, ranks, microbatches):
        return None
    return tuple(_value("peak_activations", row, ranks, microbatches, rank) for rank in range(ranks))


def _bubble_of_formula(row: Row, ranks: int, microbatches: int) -> float | None:
    if SPECS[row.schedule].formulas is None or not _value("when", row, ranks, microbatches):
        return None
    return _value("bubble_ratio", row, ranks, microbatches)


def _value(which: str, row: Row, ranks: int, microbatches: int, rank: int = 0) -> float:
    """One of the registry's formulas, which are Python."""
    names = {"D": ranks, "T": microbatches, "v": row.chunks, "r": rank, "min": min, "max": max}
    names |= {"F": COSTS.F, "B": COSTS.B, "I": COSTS.I, "W": COSTS.W, "__builtins__": {}}
    return float(eval(getattr(SPECS[row.schedule].formulas_of(row.variant), which), names))
