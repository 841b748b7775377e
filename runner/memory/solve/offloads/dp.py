"""The offload strategy that finds by dynamic programming which layers move what they save under memory_limit."""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.offload import Offload, move_all, prefixes
from runner.memory.solve.planned_moves import planned_moves, with_neighbours
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, StageChain
from runner.memory.solve.weight_sets import least_set

__all__ = ["OFFLOAD"]


def _candidates(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    found = [*prefixes("greedy", program, chain.indices), *planned_moves(chain, "dp", recomputes=False)]
    yield from with_neighbours(found)


OFFLOAD = Offload(
    "dp",
    move_all,
    source="Beaumont et al. 2020, Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training",
    about="the layers whose moves cost least time under memory_limit and the link's speed, by dynamic programming",
    candidates=_candidates,
    alone=True,
    choose_weights=lambda stage: least_set(stage.units, stage.excess_bytes or 0),
)
