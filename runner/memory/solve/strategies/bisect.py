"""The strategy that halves a stage until a part is short enough to keep its graphs.

The left half is run forward again, and its input is kept meanwhile; the right half goes on from the middle. Down to
single layers, l layers keep log2 l inputs and take (l / 2) log2 l more forwards, if l is a power of two.

Source: J. M. Siskind, B. A. Pearlmutter 2018, Divide-and-Conquer Checkpointing for Arbitrary Programs with No User
Annotation. There the halves are those of an execution, which may be interrupted anywhere; here they are of layers.
"""

from __future__ import annotations

from runner.memory.solve.build import Cut, Keep, program_of
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, StageChain
from runner.options import Option

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    leaf = chain.options.get("leaf", 1)

    def decide(first: int, last: int, _: None) -> Cut[None] | Keep[None]:
        count = last - first + 1
        return Keep(last, None) if count <= leaf else Cut(first + count // 2 - 1, None, None)

    return program_of(chain.first, chain.last, None, decide)


STRATEGY = Strategy(
    "bisect",
    _solve,
    source="Siskind and Pearlmutter 2018, Divide-and-Conquer Checkpointing for Arbitrary Programs",
    about="a stage is halved again and again; the left halves are run forward again",
    options=(
        Option(
            "leaf",
            int,
            "most layers of a part that is not halved any more, whose graphs are alive together; null = 1",
            example="2",
            rule="must be at least 1",
            breaks=lambda leaf: leaf < 1,
            fix="1",
            required=False,
        ),
    ),
)
