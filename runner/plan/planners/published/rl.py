"""``planner=rl``: a policy that samples cuts learns from their played steps, by REINFORCE.

For every depth, one softmax over the layers for each boundary; the boundaries of a sample are sorted. Batches of 16
samples are played in 1f1b; the reward is minus the root of the step's seconds, and a large constant where boundaries
meet or a stage does not fit. A moving average is the baseline, Adam the optimizer. The best sample of all is taken.
The numbers are seeded, and what is played is limited by its actions, so the answer is the same everywhere.

Source: Mirhoseini et al. 2017, Device placement optimization with reinforcement learning (reconstruction: a softmax for
each boundary instead of a recurrent network, and plays instead of measured runs).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runner.plan.planners.kinds import CUTS, PlannerKind
from runner.plan.planners.orders import Orders, PlayedOrder
from runner.plan.planners.published.chain import answer_of, divisors, with_microbatches
from runner.plan.planners.stages import Candidates, Setting, StageTable, Whole
from runner.plan.planners.values import Order, PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import Numbers

__all__ = ["Learned", "PLANNER", "learn", "plan"]

_BATCH = 16
_RATE, _FIRST, _SECOND, _TINY = 0.1, 0.9, 0.999, 1e-8  # of Adam
_KEEPS = 0.9  # of the baseline
_WORST = 2.0  # times the lowest reward of a batch's valid samples: that of those that are none
_ROUNDS = 120  # batches of a depth
_ACTIONS = 200_000  # of all batches of a depth: longer orders are played in fewer


@dataclass
class Learned:
    """What a policy has found for one depth.

    Args:
        best: the first layer of each stage of the best sample, and its seconds; None if no sample was valid.
        own: the same of the policy's own choice, the likeliest layer of each boundary; None if it is none.
        samples: how many were played.
        history: the seconds of each sample in their order; infinite where it was none.
        choices: the seconds of the policy's own choice before the first batch and after each one; infinite where it is
            none.
    """

    best: tuple[tuple[int, ...], float] | None
    own: tuple[tuple[int, ...], float] | None
    samples: int
    history: list[float]
    choices: list[float]


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    orders, found = Orders(), list[tuple[float, int, tuple[int, ...]]]()
    for depth in divisors(problem.ranks):
        data = problem.ranks // depth
        if depth > len(problem.layers) or count % data:
            continue
        order = orders.of(Order("1f1b", 1) if depth > 1 else None, depth, count // data)
        assert order is not None  # 1F1B exists for all numbers
        setting = Setting(problem.divisions[0], problem.batch / count, count // data, data, None)
        table = StageTable(problem, setting)
        rounds = min(_ROUNDS, max(1, _ACTIONS // order.num_actions)) if depth > 1 else 1
        learned = learn(table, order, problem.memory[problem.ranks], rounds)
        if learned.best is not None:
            found.append((learned.best[1], depth, learned.best[0]))
    if not found:
        return None
    seconds, depth, cut = min(found)
    ends = [*cut[1:], len(problem.layers)]
    return answer_of(
        "rl",
        problem,
        tuple((first, end - 1) for first, end in zip(cut, ends, strict=True)),
        replicas=(problem.ranks // depth,) * depth,
        tensor=(1,) * depth,
        microbatches=count * depth // problem.ranks,
        kept=(problem.divisions[0].kept[0].name,) * depth,
        seconds=seconds,
    )


def learn(table: StageTable, order: PlayedOrder, limit: float, rounds: int, seed: int = 0) -> Learned:
    """Train a policy for so many batches.

    Args:
        table: seconds and bytes of stages.
        order: the order that is played.
        limit: bytes of a rank.
        rounds: batches.
        seed: the seed of the samples.
    """
    policy = _Policy(order.stages - 1, table.num_layers - 1, seed)
    made, unit = Learned(None, None, 0, [], []), 0.0
    for _ in range(rounds):
        taken = policy.samples()
        seconds, own = np.split(_played(table, order, limit, np.hstack([taken, policy.likely()])), [_BATCH])
        made.choices += own.tolist()
        made.samples += _BATCH
        made.history += seconds.tolist()
        best, valid = int(seconds.argmin()), np.isfinite(seconds)
        if valid.any():
            unit = unit or float(seconds[best])
            if made.best is None or seconds[best] < made.best[1]:
                made.best = _cut(taken[:, best]), float(seconds[best])
        scaled = np.sqrt(np.where(valid, seconds, 0.0) / (unit or 1.0))
        policy.learn(taken, -np.where(valid, scaled, _WORST * max(1.0, float(scaled.max()))))
    likely = policy.likely()
    seconds = _played(table, order, limit, likely)
    made.choices += seconds.tolist()
    if np.isfinite(seconds[0]):
        made.own = _cut(likely[:, 0]), float(seconds[0])
    return made


class _Policy:
    """One softmax over the layers behind which a stage may begin, for each boundary; Adam climbs the rewards."""

    def __init__(self, boundaries: int, places: int, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._logits, self._moment, self._square = (np.zeros((boundaries, max(places, 1))) for _ in range(3))
        self._steps, self._baseline = 0, 0.0

    def samples(self) -> Whole:
        """Places that were drawn, shape (boundaries, batch)."""
        sums = self._chances().cumsum(axis=1)[:, :, None]
        drawn = self._draw.random((len(sums), 1, _BATCH))
        found: Whole = (sums < drawn).sum(axis=1).clip(max=sums.shape[1] - 1)
        return found

    def likely(self) -> Whole:
        """The likeliest place of each boundary, shape (boundaries, 1)."""
        found: Whole = self._logits.argmax(axis=1)[:, None]
        return found

    def learn(self, taken: Whole, rewards: Numbers) -> None:
        """One step of REINFORCE with the samples' rewards."""
        self._steps += 1
        mean = float(rewards.mean())
        self._baseline = mean if self._steps == 1 else _KEEPS * self._baseline + (1 - _KEEPS) * mean
        chosen = (taken[:, None, :] == np.arange(self._logits.shape[1])[None, :, None]).astype(float)
        gradient = ((chosen - self._chances()[:, :, None]) * (rewards - self._baseline)).mean(axis=2)
        self._moment = _FIRST * self._moment + (1 - _FIRST) * gradient
        self._square = _SECOND * self._square + (1 - _SECOND) * gradient**2
        size = np.sqrt(self._square / (1 - _SECOND**self._steps)) + _TINY
        self._logits = self._logits + _RATE * self._moment / (1 - _FIRST**self._steps) / size

    def _chances(self) -> Numbers:
        raised = np.exp(self._logits - self._logits.max(axis=1, keepdims=True))
        found: Numbers = raised / raised.sum(axis=1, keepdims=True)
        return found


def _cut(taken: Whole) -> tuple[int, ...]:
    return (0, *(int(at) + 1 for at in np.sort(taken)))


def _played(table: StageTable, order: PlayedOrder, limit: float, taken: Whole) -> Numbers:
    """Seconds of each sample; infinite where boundaries meet or a rank does not fit."""
    inner = np.sort(taken, axis=0) + 1
    valid = (np.diff(inner, axis=0) > 0).all(axis=0)
    count = inner.shape[1]
    even = [table.num_layers * at // order.stages for at in range(1, order.stages)]
    inner = np.where(valid, inner, np.array(even, dtype=np.int64)[:, None])
    ends = np.full((1, count), table.num_layers)
    cuts = np.concatenate([np.zeros((1, count), dtype=np.int64), inner, ends]).astype(np.int64)
    candidates = Candidates(cuts, np.zeros((order.stages, count), dtype=np.int64))
    fits = table.peaks(candidates, order).max(axis=0) <= limit
    found: Numbers = np.where(valid & fits, table.step_seconds(candidates, order), np.inf)
    return found


PLANNER = PlannerKind(
    name="rl",
    plan=plan,
    axes=(CUTS,),
    chooses="cut, depth",
    by="samples of a policy that learns, played",
    lacks="recomputation",
    position=70,
)
