"""The strategy that cuts a stage at small separators of its graph, and the parts again.

Source: Kumar, Purohit, Svitkina, Vee, Wang 2019, Efficient Rematerialization for Deep Networks.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.graph.separators import deepest, separated_order
from runner.memory.solve.graph.stage import graph_of, program_of_order
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import Segment, StageChain

__all__ = ["STRATEGY"]


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """The program that keeps everything, and those of more and more cuts."""
    yield Candidate("treewidth", (Segment(chain.first, chain.last),))
    stage = graph_of(chain)
    programs = (program_of_order(stage, separated_order(stage, depth)) for depth in range(1, deepest(stage) + 1))
    yield from (Candidate("treewidth", program) for program in dict.fromkeys(programs))


STRATEGY = Strategy(
    "treewidth",
    FULL.solve,
    source="Kumar et al. 2019, Efficient Rematerialization for Deep Networks",
    about="under memory_limit, a stage is cut at its smallest separators, and the parts again; they keep only those",
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
    runs_graphs=True,
)
