"""The strategy that cuts a stage into segments, each of which is cut again when it is run forward again.

With k kept inputs at each level, n layers need the memory of k log_{k+1} n inputs and of one layer's graph.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, section 4.4.
"""

from __future__ import annotations

from runner.memory.solve.build import Cut, Keep, program_of
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, StageChain
from runner.options import Option

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    parts = chain.options["cuts"] + 1

    def decide(first: int, last: int, left: int) -> Cut[int] | Keep[int]:
        """Cut off the first of the parts that are left on this level; the last of them is a new level by itself."""
        count = last - first + 1
        if count == 1:
            return Keep(last, parts)
        left = left if left > 1 else parts
        return Cut(first + max(1, count // left) - 1, inside=parts, rest=left - 1)

    return program_of(chain.first, chain.last, parts, decide)


STRATEGY = Strategy(
    "chen_recursive",
    _solve,
    source="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, section 4.4",
    about="each segment is cut again when it is run forward again, down to one layer",
    options=(
        Option(
            "cuts",
            int,
            "layer inputs that are kept at each level, which cut a part into one more segments",
            example="1",
            rule="must be at least 1",
            breaks=lambda cuts: cuts < 1,
            fix="1",
        ),
    ),
)
