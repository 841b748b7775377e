"""The offload strategy that moves and computes again what takes least time under memory_limit."""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.offload import Offload, move_all
from runner.memory.solve.offloads.dp import OFFLOAD as DP
from runner.memory.solve.planned_moves import planned_moves, with_neighbours
from runner.memory.solve.strategies.none import STRATEGY as NONE
from runner.memory.solve.strategies.rotor import STRATEGY as ROTOR
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, StageChain

__all__ = ["OFFLOAD"]


def _candidates(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    """What moves alone and what computing again alone can do, and both together."""
    for alone in (DP.over(NONE), ROTOR):
        assert alone.candidates is not None  # both choose among some
        yield from alone.candidates(chain)
    yield from with_neighbours(planned_moves(chain, "pofo", recomputes=True))


OFFLOAD = Offload(
    "pofo",
    move_all,
    source="Beaumont et al. 2021, Efficient Combination of Rematerialization and Offloading for Training DNNs",
    about="what is moved and what is computed again, whichever takes least time, under memory_limit",
    candidates=_candidates,
    alone=True,
)
