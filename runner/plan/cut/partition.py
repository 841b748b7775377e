"""Cuts a chain of layers into contiguous stages.

``uniform`` balances layers, ``parameters`` parameters, ``profile`` measured seconds under a memory limit, ``memory``
peak bytes with the micro-batches in flight; ``manual`` takes given boundaries. The min-max partitions are exact
(dynamic programming over prefix sums, PipeDream's single-level case). Among the partitions with the least maximum they
take the one with the least sum of squares, so that the other stages are even too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from runner.errors import Problem, RequestError
from runner.plan.cut.balance import balance_ranks
from runner.plan.cut.by_rank import fastest_that_fits, least_peak_of_ranks
from runner.plan.cut.values import Partition, RankLimit, StageLimit
from runner.plan.layout.batches import split_sizes
from runner.profile import ModelProfile

__all__ = [
    "NothingFitsError",
    "Partition",
    "StageLimit",
    "StagePeaks",
    "least_peak",
    "min_max",
    "partition",
    "partition_problems",
    "uniform",
]

_OPTIONS = ("auto", "uniform", "parameters", "profile", "memory", "manual")


class NothingFitsError(RequestError):
    """Raised if no partition keeps every stage under its limit."""


class StagePeaks(StageLimit, Protocol):
    """Tells the memory that a stage with some layers needs. Layers are first .. last, both inclusive."""

    def peak_bytes(self, first: int, last: int, stage: int) -> int:
        """The stage's peak memory."""

    def floor_bytes(self, first: int, last: int, stage: int) -> int:
        """A lower bound of the peak of these layers, also if layers before ``first`` are added."""


def partition(
    name: str,
    profile: ModelProfile,
    stages: int,
    *,
    boundaries: Sequence[int] | None = None,
    limit: StagePeaks | None = None,
    placement: Sequence[int] | None = None,
    ranks: RankLimit | None = None,
    as_fast_as: Partition | None = None,
    replicas: Sequence[int] | None = None,
) -> Partition:
    """Choose the stages' layers with the partition policy ``name``.

    Args:
        name: uniform, parameters, profile, memory or manual; ``auto`` is :func:`runner.plan.search.partition.best_cut`.
        profile: the model's layers; the policy ``profile`` reads their seconds, and adds the loss to the last stage.
        stages: number of stages, over all chunks.
        boundaries: for ``manual``: the first layer of each stage after the first.
        limit: for ``profile``: which layers a stage may hold; None = any. For ``memory``: the memory that they need.
        placement: for ``profile`` and ``parameters``: the rank of each stage. If ranks hold several stages, the sums
            of ranks are balanced too.
        ranks: for ``profile`` and ``memory``, if ranks hold several stages: the memory of whole ranks. It needs
            ``limit`` and ``placement``, too.
        as_fast_as: for ``memory``: no stage takes longer than the slowest one of this partition.
        replicas: for ``profile`` and ``memory``: the ranks that take the micro-batches of each stage in turns, so that
            its seconds are divided by their number; None: one each.

    Raises:
        RequestError: if there is no such partition; see :func:`partition_problems`.
        NothingFitsError: if no partition keeps to ``limit``.
    """
    num_layers = len(profile.layers)
    problems = partition_problems(name, boundaries, stages, num_layers)
    if problems:
        raise RequestError(problems)
    if name == "uniform":
        return uniform(num_layers, stages)
    if name == "manual":
        return _from_ends([*(boundaries or ()), num_layers])
    by_parameters = name == "parameters"
    costs = [float(layer.num_parameters) for layer in profile.layers] if by_parameters else _seconds(profile)
    if name == "memory" and limit is None:
        raise ValueError("a partition by memory needs the stages' peaks")
    if ranks is not None and placement is not None and limit is not None and not by_parameters:
        found = _by_rank(name, costs, limit, placement, ranks, as_fast_as)
    elif name == "memory" and limit is not None:
        found = least_peak(costs, stages, limit, as_fast_as=as_fast_as, replicas=replicas)
    else:
        found = (
            min_max(costs, stages, limit=None)
            if by_parameters
            else min_max(costs, stages, limit=limit, replicas=replicas)
        )
        found = _balanced(costs, found, placement) if found is not None else None
    if found is None:
        raise NothingFitsError([_nothing_fits(name, stages)])
    return found


def _by_rank(
    name: str,
    costs: Sequence[float],
    limit: StagePeaks,
    placement: Sequence[int],
    ranks: RankLimit,
    as_fast_as: Partition | None,
) -> Partition | None:
    """The partition by ``memory`` or ``profile`` of ranks with several stages; None if none is found that fits."""
    stages = len(placement)
    even, fastest = uniform(len(costs), stages), min_max(costs, stages)
    assert fastest is not None  # it has no limit
    free = _balanced(costs, fastest, placement)
    if name == "profile" and not ranks.excess(free):
        return free
    start = least_peak(costs, stages, limit) if as_fast_as is None else as_fast_as
    lowest = least_peak_of_ranks(costs, placement, [even, free, start], ranks, as_fast_as)
    return lowest if name == "memory" else fastest_that_fits(costs, placement, [free, even, lowest], ranks)


def _balanced(costs: Sequence[float], layers: Partition, placement: Sequence[int] | None) -> Partition:
    """The partition with balanced ranks, if ranks hold several stages."""
    if placement is None or len(set(placement)) == len(placement):
        return layers
    return balance_ranks(costs, layers, placement)


def partition_problems(name: str, boundaries: Sequence[int] | None, stages: int, num_layers: int) -> list[Problem]:
    """Reasons why ``num_layers`` layers cannot be cut into ``stages`` stages in this way."""
    problems = []
    if name not in _OPTIONS:
        problems.append(Problem("partition", name, f"must be one of {', '.join(_OPTIONS)}", fix="partition=auto"))
    if stages > num_layers:
        problems.append(
            Problem(
                "parallelism.pipeline",
                stages,
                f"the schedule makes {stages} stages, the model has {num_layers} layers",
                "each stage needs at least one layer",
                f"parallelism.pipeline={num_layers}",
            )
        )
    elif name == "manual":
        problems.extend(_boundary_problems(list(boundaries or ()), stages, num_layers))
    return problems


def uniform(num_layers: int, stages: int) -> Partition:
    """The partition with equal numbers of layers, up to one; the first stages take the extra layers.

    The last stage also has the loss and usually the widest layer, and the first stage usually the cheapest layer (an
    embedding). So the extra layers go to the front, as with ``tensor_split``.
    """
    return _from_ends(list(accumulate(split_sizes(num_layers, stages))))


def min_max(
    costs: Sequence[float], stages: int, *, limit: StageLimit | None = None, replicas: Sequence[float] | None = None
) -> Partition | None:
    """Find the contiguous partition whose largest stage cost is least, and then the one with the least sum of squares.

    Args:
        costs: non-negative cost of each layer.
        stages: number of stages, at most ``len(costs)``; no stage is empty.
        limit: which layers a stage may hold.
        replicas: numbers by which the cost of each stage is divided, also speeds of devices; None: 1.

    Returns:
        the partition, or None if no partition keeps to the limit.
    """
    cost = _cost_of_stages(costs, replicas)

    def largest(layers: Partition) -> float:
        return max(cost(first, last + 1, stage) for stage, (first, last) in enumerate(layers))

    # Usually a partition at least as good as the uniform one fits; with that as the ceiling the search is short.
    ceilings = (largest(uniform(len(costs), stages)), math.inf)
    searches = (_search(len(costs), stages, cost, max, ceiling, limit) for ceiling in ceilings)
    found = next((layers for layers in searches if layers is not None), None)
    if found is None:
        return None
    least = largest(found)
    return _search(len(costs), stages, lambda i, j, s: cost(i, j, s) ** 2, lambda a, b: a + b, least**2, limit)


def least_peak(
    seconds: Sequence[float],
    stages: int,
    peaks: StagePeaks,
    *,
    as_fast_as: Partition | None = None,
    replicas: Sequence[int] | None = None,
) -> Partition:
    """Find the partition whose largest stage peak is least and, among these, the one whose slowest stage is fastest.

    The result is exact for the peaks of stages. If ranks hold several stages, the peaks of ranks are not compared.

    Args:
        seconds: seconds of each layer.
        stages: number of stages, at most ``len(seconds)``.
        peaks: gives the peak of any layers in any stage.
        as_fast_as: no stage of the result takes longer than the slowest one of this partition; None: any may.
        replicas: see :func:`min_max`.
    """
    cost = _cost_of_stages(seconds, replicas)
    fast = enumerate(as_fast_as or ())
    allowed = max((cost(first, last + 1, stage) for stage, (first, last) in fast), default=math.inf)
    spare = len(seconds) - stages
    best = {0: 0}
    for stage in range(stages):
        found: dict[int, int] = {}
        for end in range(stage + 1, stage + 2 + spare):
            least: int | None = None
            for begin in range(min(end - 1, max(best)), stage - 1, -1):
                if cost(begin, end, stage) > allowed:
                    break
                if least is not None and peaks.floor_bytes(begin, end - 1, stage) >= least:
                    break
                if begin not in best:
                    continue
                peak = max(best[begin], peaks.peak_bytes(begin, end - 1, stage))
                least = peak if least is None else min(least, peak)
            if least is not None:
                found[end] = least
        best = found
    layers = min_max(seconds, stages, limit=_Under(peaks, best[len(seconds)]), replicas=replicas)
    assert layers is not None  # the search above has found one
    return layers


def _cost_of_stages(costs: Sequence[float], replicas: Sequence[float] | None) -> Callable[[int, int, int], float]:
    """What layers ``begin .. end - 1`` cost as the layers of a stage."""
    prefix = list(accumulate(costs, initial=0.0))
    if replicas is None:
        return lambda begin, end, stage: prefix[end] - prefix[begin]
    return lambda begin, end, stage: (prefix[end] - prefix[begin]) / replicas[stage]


@dataclass(frozen=True)
class _Under:
    """Limits stages to ``limit_bytes``, which may be less than the memory of a rank."""

    peaks: StagePeaks
    limit_bytes: int

    def fits(self, first: int, last: int, stage: int) -> bool:
        return self.peaks.peak_bytes(first, last, stage) <= self.limit_bytes

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        return self.peaks.floor_bytes(first, last, stage) > self.limit_bytes


def _search(
    num_layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    ceiling: float,
    limit: StageLimit | None,
) -> Partition | None:
    """Search by dynamic programming over (stages, layers so far), with each stage's cost at most ``ceiling``.

    ``cost(begin, end, stage)`` of layers begin .. end-1 grows as ``begin`` falls, and ``join`` is never below either of
    its arguments.
    So the inner loop ends at the first ``begin`` that costs more than the best result so far, and is about as long as
    a stage.
    """
    spare = num_layers - stages
    best = {0: 0.0}
    choices: list[dict[int, int]] = []
    for stage in range(stages):
        found: dict[int, float] = {}
        choice: dict[int, int] = {}
        furthest = max(best, default=-1)
        for end in range(stage + 1, stage + 2 + spare):
            least = math.inf
            for begin in range(min(end - 1, furthest), stage - 1, -1):
                own = cost(begin, end, stage)
                if own > ceiling or own >= least:
                    break
                total = join(best.get(begin, math.inf), own)
                if total >= least:
                    continue
                if limit is None or limit.fits(begin, end - 1, stage):
                    least, choice[end] = total, begin
                elif limit.hopeless(begin, end - 1, stage):
                    break
            if end in choice:
                found[end] = least
        best = found
        choices.append(choice)
    if num_layers not in best:
        return None
    ends = [num_layers]
    for choice in reversed(choices[1:]):
        ends.append(choice[ends[-1]])
    return _from_ends(ends[::-1])


def _seconds(profile: ModelProfile) -> list[float]:
    seconds = [layer.forward_seconds + layer.backward_seconds for layer in profile.layers]
    seconds[-1] += profile.loss.forward_seconds + profile.loss.backward_seconds
    return seconds


def _from_ends(ends: Sequence[int]) -> Partition:
    return tuple((begin, end - 1) for begin, end in zip([0, *ends[:-1]], ends, strict=True))


def _boundary_problems(boundaries: list[int], stages: int, num_layers: int) -> list[Problem]:
    even = [first for first, _ in uniform(num_layers, stages)[1:]]
    fix = f"partition.boundaries=[{','.join(map(str, even))}]"
    shown = f"[{','.join(map(str, boundaries))}]"
    problems = []
    if len(boundaries) != stages - 1:
        rule = f"{stages} stages need {stages - 1} boundaries, the first layer of each stage after the first"
        problems.append(Problem("partition.boundaries", shown, rule, fix=fix))
    if any(not 0 < boundary < num_layers for boundary in boundaries):
        rule = f"each boundary must lie in 1 .. {num_layers - 1}"
        problems.append(Problem("partition.boundaries", shown, rule, f"the model has {num_layers} layers", fix))
    if any(after <= before for before, after in zip(boundaries, boundaries[1:], strict=False)):
        rule = "boundaries must rise"
        problems.append(Problem("partition.boundaries", shown, rule, "each stage needs at least one layer", fix))
    return problems


def _nothing_fits(name: str, stages: int) -> Problem:
    return Problem(
        "partition",
        name,
        f"no contiguous partition into {stages} stages keeps every rank under the memory limit",
        "A rank holds weights, gradients, optimizer states and in-flight micro-batches of its stages",
        "partition=auto",
    )
