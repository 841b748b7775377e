"""The strategy that finds a stage's cheapest graph program, and with it what each layer keeps of its operators.

It is checkmate with several ways to run a layer again: from its input, or from the outputs of a preset of operators,
convolutions above all, that its first run has left. Both are chosen in one mixed integer program. MONeT chooses among
implementations of each operator's backward, which save its input or its output; here a norm's backward has its input
where the convolution before it was kept, and an activation's has its output, which is made again at little cost.

Source: Shah, Wu, Mohan, Chidambaram, Krähenbühl 2021, Memory Optimization for Deep Networks (MONeT).
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.graph.stage import operator_ways
from runner.memory.solve.strategies.checkmate import PROGRAM_LAYERS, programs_of
from runner.memory.solve.strategies.checkmate import STRATEGY as CHECKMATE
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import StageChain

__all__ = ["STRATEGY"]

_NODES = 500  # of the solver's tree for the larger program; where it is not enough, one of checkmate's may be chosen


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """Checkmate's programs, and those in which layers may keep outputs of chosen operators."""
    assert CHECKMATE.candidates is not None
    yield from (Candidate("monet", each.program) for each in CHECKMATE.candidates(chain))
    if any(map(operator_ways, chain.layers)):
        programs = dict.fromkeys(programs_of(chain, with_operators=True, nodes=_NODES))
        yield from (Candidate("monet", program) for program in programs)


STRATEGY = Strategy(
    "monet",
    FULL.solve,
    source="Shah et al. 2021, Memory Optimization for Deep Networks (MONeT)",
    about="checkmate, in which a layer may also keep outputs of chosen operators and make the rest again",
    options=(PROGRAM_LAYERS,),
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
    runs_graphs=True,
)
