"""The strategy that takes, for each stage, the fastest program of the other strategies under memory_limit.

Where layers pass on what only later ones read, such as the skips of a U-Net, a chain program holds it all the time.
There programs of the strategies of graphs are offered, too, that are found within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from runner.memory.solve.graph.stage import needed_inputs, stage_tensors
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import StageChain

__all__ = ["STRATEGY"]

_GRAPHS: dict[str, dict[str, object]] = {"dtr": {}, "kusumoto": {"approximate": True}}


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    from runner.memory.solve.strategies import STRATEGIES  # the package imports this module first

    for strategy in STRATEGIES.values():
        if strategy is not STRATEGY and strategy.candidates is not None and not _is_bound(strategy):
            yield from strategy.candidates(chain)
    if chain.may_run_graphs and _passes_on(chain):
        for name, options in _GRAPHS.items():
            candidates = STRATEGIES[name].candidates
            assert candidates is not None
            yield from candidates(replace(chain, options=options))


def _passes_on(chain: StageChain) -> bool:
    """Whether a layer gets a tensor that it does not read, but a later one does."""
    tensors = stage_tensors(chain)
    inputs = (tuple(tensors.inputs(at)) for at in range(len(chain.layers)))
    return any(len(needed_inputs(*each)) < len(each[1]) for each in zip(chain.layers, inputs, strict=True))


def _is_bound(strategy: Strategy) -> bool:
    """Whether a strategy's programs take long to find, or are refused beside other options."""
    return strategy.runs_graphs or strategy.picks_operators


STRATEGY = Strategy(
    "auto",
    FULL.solve,
    source="the strategies among which it chooses",
    about="for each stage the fastest program of the other strategies under memory_limit",
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
)
