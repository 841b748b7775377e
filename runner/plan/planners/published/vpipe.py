"""``planner=vpipe``: what each layer saves is kept, moved to the host or made again, in turn with moves of layers.

In each stage the choice with the least added seconds that fits: copies to the host, and as many back, are hidden
behind the stage's computations, and what is longer is added; what is made again is added. Then layers at the
boundaries move from the slowest stage to its faster neighbour, each layer once, and the best of these cuts is kept, as
long as it improves. A step is the slowest stage for each micro-batch and each other stage. The paper does this while
a run trains and moves live layers; here it is done before, so a run starts with the cut that vPipe would end with.

Source: Zhao et al. 2021, vPipe (reconstruction: its public code has no planner). The paper's depth is given: here it is
the best of those that fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from runner.plan.planners.kinds import AGAIN, CUTS, PlannerKind
from runner.plan.planners.published.chain import (
    Chain,
    answer_of,
    divisors,
    even_cut,
    ways_of,
    with_microbatches,
)
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["Chosen", "PLANNER", "Row", "cut_and_ways", "in_stage", "plan"]

_ALL = 20_000  # choices of a stage that are all compared
_ROUNDS = 20

Cut = tuple[int, ...]  # the first layer of each stage, and the number of layers


class Row(NamedTuple):
    """A layer: bytes of all micro-batches if kept, and if made again; seconds of that, and of its copy to the host."""

    kept: float
    again: float
    extra: float
    copy: float


class Chosen(NamedTuple):
    """What a stage does: seconds that are added, and the places of the layers made again and of those moved."""

    added: float
    again: tuple[int, ...]
    moved: tuple[int, ...]


def in_stage(rows: Sequence[Row], room: float, hidden: float) -> Chosen | None:
    """The choice for a stage that fits with the least added seconds.

    Equal layers are counted, not told apart. Where there are too many choices, layers are moved by the most bytes for a
    second of the link as long as that is hidden, and the others made again by the least seconds for a byte.

    Args:
        rows: the layers.
        room: bytes for what all of them keep.
        hidden: seconds of the stage's computations, behind which copies hide.

    Returns:
        None if nothing fits.
    """
    if sum(row.kept for row in rows) <= room:
        return Chosen(0.0, (), ())
    kinds: dict[Row, list[int]] = {}
    for at, row in enumerate(rows):
        kinds.setdefault(row, []).append(at)
    if prod((len(each) + 1) * (len(each) + 2) // 2 for each in kinds.values()) > _ALL:
        return _greedy(rows, room, hidden)
    best: Chosen | None = None
    for counts in product(*(_counts(len(places)) for places in kinds.values())):
        size = extra = copies = 0.0
        for (again, moved), (row, places) in zip(counts, kinds.items(), strict=True):
            size += again * row.again + (len(places) - again - moved) * row.kept
            extra += again * row.extra
            copies += moved * row.copy if moved else 0.0
        added = max(extra, copies - hidden)
        if size <= room and (best is None or added < best.added):
            chosen = list(zip(counts, kinds.values(), strict=True))
            best = Chosen(
                added,
                tuple(sorted(at for (again, _), places in chosen for at in places[:again])),
                tuple(sorted(at for (again, moved), places in chosen for at in places[again : again + moved])),
            )
    return best


def _counts(layers: int) -> list[tuple[int, int]]:
    return [(again, moved) for again in range(layers + 1) for moved in range(layers + 1 - again)]


def _greedy(rows: Sequence[Row], room: float, hidden: float) -> Chosen | None:
    size, copies, extra = sum(row.kept for row in rows), 0.0, 0.0
    moved, again = list[int](), list[int]()
    for at in sorted(range(len(rows)), key=lambda at: rows[at].copy / max(rows[at].kept, 1.0)):
        if size > room and copies + rows[at].copy <= hidden:
            moved.append(at)
            size, copies = size - rows[at].kept, copies + rows[at].copy
    rest = [at for at in range(len(rows)) if at not in moved and rows[at].again < rows[at].kept]
    for at in sorted(rest, key=lambda at: rows[at].extra / (rows[at].kept - rows[at].again)):
        if size > room:
            again.append(at)
            size, extra = size - rows[at].kept + rows[at].again, extra + rows[at].extra
    return Chosen(extra, tuple(sorted(again)), tuple(sorted(moved))) if size <= room else None


@dataclass
class _Stages:
    """Stages of one depth: what each does, looked at once."""

    chain: Chain
    less: Chain
    pipeline: int
    count: int

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, int, int], Chosen | None] = {}

    def of(self, stage: int, first: int, end: int) -> Chosen | None:
        """What a stage does; None if it does not fit."""
        if (stage, first, end) not in self._known:
            self._known[stage, first, end] = self._of(stage, first, end)
        return self._known[stage, first, end]

    def _of(self, stage: int, first: int, end: int) -> Chosen | None:
        flight, problem = min(self.pipeline - stage, self.count), self.chain.problem
        working = max(self.chain.working(), self.less.working())
        room = problem.memory[problem.ranks] - self.chain.held(first, end) - working
        rows = []
        for at in range(first, end):
            kept, again = (each.total("saved", at, at + 1) for each in (self.chain, self.less))
            extra = max(self.less.seconds(at, at + 1) - self.chain.seconds(at, at + 1), 0.0)
            copy = problem.host.seconds(kept) if problem.host is not None else float("inf")
            rows.append(Row(flight * kept, flight * again, extra, copy))
        found = in_stage(rows, room, self.chain.seconds(first, end))
        if found is not None and found.moved:  # one layer leaves while another comes back
            passing = 2 * max(self.chain.total("saved", at, at + 1) for at in range(first, end))
            found = in_stage(rows, room - passing, self.chain.seconds(first, end))
        if found is None or found.added == float("inf"):
            return None
        return Chosen(found.added, *(tuple(first + at for at in places) for places in found[1:]))

    def seconds(self, cut: Cut) -> list[float]:
        """Seconds of each stage for a micro-batch; infinite where it does not fit."""
        found = []
        for stage, (first, end) in enumerate(pairwise(cut)):
            chosen = self.of(stage, first, end)
            added = chosen.added if chosen is not None else float("inf")
            found.append(self.chain.seconds(first, end) + added)
        return found


def cut_and_ways(chain: Chain, less: Chain, pipeline: int, count: int) -> tuple[float, Cut, list[Chosen]] | None:
    """The slowest stage's seconds, the cut, and what each stage does; None if nothing that was tried fits."""
    stages = _Stages(chain, less, pipeline, count)
    cut: Cut = (0, *(last + 1 for _, last in even_cut(len(chain.problem.layers), pipeline)))
    for _ in range(_ROUNDS):
        tried = [cut, *_moves(stages, cut)]
        best = min(tried, key=lambda each: _order(stages.seconds(each)))
        if best == cut:
            break
        cut = best
    slowest = max(stages.seconds(cut))
    chosen = [stages.of(stage, first, end) for stage, (first, end) in enumerate(pairwise(cut))]
    made = [each for each in chosen if each is not None]
    return (slowest, cut, made) if len(made) == pipeline else None


def _order(seconds: list[float]) -> tuple[int, float]:
    finite = [each for each in seconds if each != float("inf")]
    return len(seconds) - len(finite), max(finite, default=0.0)


def _moves(stages: _Stages, cut: Cut) -> Iterator[Cut]:
    """The cuts that follow when a layer after the other leaves the slowest stage; no layer moves twice."""
    moved = set[int]()
    for _ in range(cut[-1]):
        seconds = stages.seconds(cut)
        slowest = max(range(len(seconds)), key=lambda stage: seconds[stage])
        first, end = cut[slowest], cut[slowest + 1]
        ways = []
        if slowest > 0 and first not in moved:
            ways.append((seconds[slowest - 1], first, slowest, 1))
        if slowest + 1 < len(seconds) and end - 1 not in moved:
            ways.append((seconds[slowest + 1], end - 1, slowest + 1, -1))
        if end - first < 2 or not ways:
            return
        _, layer, at, by = min(ways)
        moved.add(layer)
        cut = (*cut[:at], cut[at] + by, *cut[at + 1 :])
        yield cut


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    keep, rerun = ways_of(problem)
    samples, division, found = problem.batch / count, problem.divisions[0], list[tuple[float, int]]()
    chain, less = Chain(problem, division, samples, keep), Chain(problem, division, samples, rerun)
    made = {}
    for pipeline in divisors(problem.ranks):
        data = problem.ranks // pipeline
        if pipeline > len(problem.layers) or count % data:
            continue
        best = cut_and_ways(chain, less, pipeline, count // data)
        if best is not None:
            made[pipeline] = best
            sums = max(chain.sum_seconds(first, end, data) for first, end in pairwise(best[1]))
            found.append(((count // data + pipeline - 1) * best[0] + sums, pipeline))
    if not found:
        return None
    seconds, pipeline = min(found)
    _, cut, chosen = made[pipeline]
    names = [kept.name for kept in division.kept]
    return answer_of(
        "vpipe",
        problem,
        tuple((first, end - 1) for first, end in pairwise(cut)),
        replicas=(problem.ranks // pipeline,) * pipeline,
        tensor=(1,) * pipeline,
        microbatches=count * pipeline // problem.ranks,
        kept=tuple(names[rerun if each.again else keep] for each in chosen),
        seconds=seconds,
        again=tuple(layer for each in chosen for layer in each.again),
        offload="activations_vpipe" if any(each.moved for each in chosen) else None,
    )


PLANNER = PlannerKind(
    name="vpipe",
    plan=plan,
    axes=(
        CUTS,
        AGAIN,
    ),
    chooses="cut, depth, recomputation and moves to the host by layer",
    by="exact in a stage, in turn with moves of layers",
    lacks="bubbles of unlike stages",
    position=150,
)
