"""The strategy that computes again segments with equal numbers of layers."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain
from runner.options import Option

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    """Keep the input of every k-th layer, counted from the first layer of the stage."""
    return _of_period(chain, chain.options["every"])


def _of_period(chain: StageChain, every: int) -> ChainProgram:
    starts = range(chain.first, chain.last + 1, every)
    return tuple(Segment(start, min(start + every - 1, chain.last), recompute=True) for start in starts)


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """Every number of segments up to twice the square root of the layers; more segments are nearly ``full``."""
    count = len(chain.layers)
    periods = dict.fromkeys(-(-count // segments) for segments in range(1, 2 * isqrt(count) + 1))
    yield from (Candidate(f"periodic every={every}", _of_period(chain, every)) for every in periods)


STRATEGY = Strategy(
    "periodic",
    _solve,
    source="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, with a given period",
    about="of every so many layers the input of the first alone is kept",
    options=(
        Option(
            "every",
            int,
            "layers whose input alone is kept, and that are computed again together",
            example="2",
            rule="must be at least 1",
            breaks=lambda every: every < 1,
            fix="1",
        ),
    ),
    candidates=_candidates,
)
