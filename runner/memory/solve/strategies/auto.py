"""The strategy that takes, for each stage, the fastest chain program of all strategies under memory_limit."""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import StageChain

__all__ = ["STRATEGY"]


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    from runner.memory.solve.strategies import STRATEGIES  # the package imports this module first

    for strategy in STRATEGIES.values():
        if strategy is not STRATEGY and strategy.candidates is not None and not _is_bound(strategy):
            yield from strategy.candidates(chain)


def _is_bound(strategy: Strategy) -> bool:
    """Whether a strategy's programs take long to find, or are refused beside other options."""
    return strategy.runs_graphs or strategy.picks_operators


STRATEGY = Strategy(
    "auto",
    FULL.solve,
    source="the strategies among which it chooses",
    about="for each stage the fastest chain program of all strategies under memory_limit",
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
)
