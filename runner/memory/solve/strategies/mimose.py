"""The strategy that chooses for each micro-batch, by the size of its input, which layers run again.

Source: Liao et al. 2023, Mimose: An Input-Aware Checkpointing Planner for Efficient Training on GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.by_size import SizedProgram, ladder
from runner.memory.solve.graph.stage import graph_of
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import Segment, StageChain

__all__ = ["STRATEGY"]


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """The program that keeps everything, and those that run more and more layers again for the largest micro-batch."""
    yield Candidate("mimose", (Segment(chain.first, chain.last),))
    steps = ladder(graph_of(chain))
    profile, before = chain.profile, chain.profile.layers[chain.first - 1] if chain.first else None
    largest = tuple((profile.samples, *shape) for shape in profile.sample_shapes) if not chain.first else ()
    for chosen in range(1, len(steps)):
        of_largest = before, chain.layers, chain.loss, profile.shared
        program = SizedProgram(chain.first, chain.last, chosen, steps, chain.in_flight, largest, *of_largest)
        yield Candidate("mimose", program)


STRATEGY = Strategy(
    "mimose",
    FULL.solve,
    source="Liao et al. 2023, Mimose: An Input-Aware Checkpointing Planner",
    about="under memory_limit, micro-batches with smaller inputs run fewer layers again, the largest first",
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
    runs_graphs=True,
)
