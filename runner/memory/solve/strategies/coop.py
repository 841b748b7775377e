"""The strategy that evicts values that lie side by side in memory, so that what they leave is one gap.

Source: Zhang, Ma, Liu, Yuan, Zhu 2023, Coop: Memory is not a Commodity.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.arena import ArenaProgram
from runner.memory.solve.strategies.dtr import pools
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import Segment, StageChain

__all__ = ["STRATEGY"]


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """The program that keeps everything, and smaller and smaller arenas."""
    yield Candidate("coop", (Segment(chain.first, chain.last),))
    yield from (Candidate("coop", program) for program in dict.fromkeys(pools(chain, "full", ArenaProgram)))


STRATEGY = Strategy(
    "coop",
    FULL.solve,
    source="Zhang et al. 2023, Coop: Memory is not a Commodity",
    about="under memory_limit, saved tensors lie in an arena; in the run, the cheapest side by side are dropped",
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
    runs_graphs=True,
)
