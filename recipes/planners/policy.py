"""How many samples the policy of ``planner=rl`` plays until one is near the best cut, and until its own choice is.

Ten chains of 12 layers with drawn seconds, each cut for 4 ranks that run 8 micro-batches by 1F1B; memory is no limit,
and messages take nothing. All 165 cuts are played, too. The draws are seeded, so that the figures are the same
anywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from runner.plan.planners.orders import Orders
from runner.plan.planners.published.rl import learn
from runner.plan.planners.stages import Candidates, Setting, StageTable
from runner.plan.planners.values import Order
from runner.recipes.planners.measured import problem

__all__ = ["CHAINS", "Reached", "lines", "reached"]

CHAINS, _LAYERS, _RANKS, _MICROBATCHES = 10, 12, 4, 8
_ROUNDS, _NEAR = 2000, 1.05


@dataclass(frozen=True)
class Reached:
    """How near the policy comes to the best cut of one chain.

    Args:
        near: the part of all cuts that take at most 5 % longer than the best.
        sample: the samples until one of them is so near; None: none of them is.
        choice: the samples until the policy's own choice is; None: it never is.
        samples: how many there were.
    """

    near: float
    sample: int | None
    choice: int | None
    samples: int


def reached(chain: int, rounds: int = _ROUNDS) -> Reached:
    """Train a policy for the chain of a number, which is the seed of its seconds, for so many batches."""
    draw = random.Random(chain)
    of = problem([draw.uniform(0.004, 0.04) for _ in range(_LAYERS)])
    order = Orders().of(Order("1f1b", 1), _RANKS, _MICROBATCHES)
    assert order is not None  # 1F1B exists for all numbers
    table = StageTable(of, Setting(of.divisions[0], of.batch / _MICROBATCHES, _MICROBATCHES, 1, None))
    cuts = np.array([(0, *inner, _LAYERS) for inner in combinations(range(1, _LAYERS), _RANKS - 1)], dtype=np.int64).T
    every = table.step_seconds(Candidates(cuts, np.zeros((_RANKS, cuts.shape[1]), dtype=np.int64)), order)
    goal = _NEAR * float(every.min())
    learned = learn(table, order, math.inf, rounds)
    batch = learned.samples // rounds
    sample, choice = _first(learned.history, goal), _first(learned.choices, goal)
    return Reached(
        float((every <= goal).mean()),
        sample + 1 if sample is not None else None,
        choice * batch if choice is not None else None,
        learned.samples,
    )


def _first(seconds: Sequence[float], goal: float) -> int | None:
    return next((number for number, each in enumerate(seconds) if each <= goal), None)


def lines(chains: Sequence[int] = range(CHAINS), rounds: int = _ROUNDS) -> Iterator[str]:
    """The table in Markdown."""
    yield "| chain | cuts within 5 % | samples until one is | samples until its own choice is |"
    yield "| --- | --- | --- | --- |"
    for chain in chains:
        made = reached(chain, rounds)
        cells = (f"{each:,}" if each is not None else f"not in {made.samples:,}" for each in (made.sample, made.choice))
        yield f"| {chain + 1} | {made.near:.1%} | {' | '.join(cells)} |"
