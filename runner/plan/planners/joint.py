"""``planner=joint``: layout, schedule, micro-batches, cut, recomputation and ZeRO are chosen together.

Layouts are taken in the order of a lower bound of their step. Each starts from a few candidates, all of which are
played at once; small spaces are played whole. The best are improved by single changes until none helps.

Source: own; the parts are published ones: bounds and beams as in Narayanan et al. 2021 (Megatron-LM), the fastest way
to keep that fits a stage as in Zheng et al. 2022 (Alpa) and Tarnawski et al. 2021 (Piper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from runner.plan.collector import collector_paused
from runner.plan.planners.cuts import all_of, neighbours, num_of_all, starts
from runner.plan.planners.orders import Orders, PlayedOrder, copies_in
from runner.plan.planners.stages import Candidates, Setting, StageTable, state_bytes
from runner.plan.planners.values import Division, Order, PlanningAnswer, PlanningProblem
from runner.schedule.catalogue.registry import SPECS
from runner.schedule.simulation.batched import Numbers

__all__ = ["EFFORTS", "TIE", "Begun", "Effort", "Family", "Found", "JointSearch", "divisors", "families", "lower_bound"]

_WHOLE = 20_000  # candidates of a space that is played whole
_NEAR = 1.15  # times the best step: candidates that are worth an improvement
_ROUNDS = 200
_ACTIONS = 3  # of a stage for a micro-batch, where its backward is in two parts
_HOPELESS = 1.05  # times the best step: a family whose closed form is beyond that is not looked at
_CHEAP = 0.01  # of the work that may be done: until then everything that the bounds allow is looked at
_MOST = 32  # micro-batches for each stage: more leave a bubble of less than 3 %
_SAME = 1e-9
_STARTS = 6  # candidates of a family from which improvements begin
_WEIGHTS = (1.0, 4.0, 16.0, 64.0)  # of the memory that a candidate lacks, one after the other
TIE = 1e-3
"""Steps that differ by less than this part are equal: the simpler one is taken."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a search may do.

    Args:
        plays: candidates times actions that are played, over all layouts.
        actions: the most actions of an order that is walked.
        improved: layouts with an order whose best candidate is improved.
        judged: answers that are planned completely.
    """

    plays: int
    actions: int
    improved: int
    judged: int


EFFORTS: Mapping[str, Effort] = {
    "quick": Effort(10**8, 20_000, 4, 4),
    "normal": Effort(10**9, 60_000, 12, 10),
    "thorough": Effort(10**10, 200_000, 60, 30),
}
"""What ``parallelism.search`` names."""


@dataclass(frozen=True, slots=True)
class Family:
    """A layout with an order, ZeRO and micro-batches: what is left to choose is the cut and what stages keep.

    Args:
        pipeline, data, tensor, microbatches: see :class:`PlanningAnswer`.
        order: see there.
        zero: see there.
        bound: seconds that no candidate of it can undercut.
        estimate: seconds by the closed form of its order for equal stages, with what they keep such that it fits.
        place: its place in the enumeration, in which simpler ones are earlier.
        in_host: whether optimizer states are in the host's memory.
    """

    pipeline: int
    data: int
    tensor: int
    microbatches: int
    order: Order | None
    zero: int | None
    bound: float
    estimate: float
    place: int
    in_host: bool = False


@dataclass
class _Best:
    """The best candidate of a family that is known."""

    family: Family
    table: StageTable
    order: PlayedOrder
    candidate: Candidates
    seconds: float
    peak: float
    limit: float
    is_free: bool = False  # whether it is the fastest of all, also of those that do not fit
    starts: Candidates | None = None  # from which improvements begin, the most promising first; None: it has none
    promise: float = 0.0  # seconds of the first of them, longer by the part of the memory that it lacks

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


@dataclass
class Found:
    """The result of a search.

    Args:
        answers: the best of each family that was looked at, those that fit before the others, the fastest first.
        families: how many were looked at.
        evaluated: how many candidates were played.
        complete: whether no limit of work ended it.
    """

    answers: list[PlanningAnswer] = field(default_factory=list)
    families: int = 0
    evaluated: int = 0
    complete: bool = True


class Begun:
    """What searches of one problem, which differ in what is fixed alone, have played before they improve it."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], tuple[_Best, int, int]] = {}  # with plays and candidates


class JointSearch:
    """Searches all layouts of a problem.

    Args:
        problem: the problem.
        effort: how much may be done.
        refused: says of a family that rules forbid it, so that it is not looked at.
        orders: the orders that were walked already.
        begun: what other searches of this problem have played already.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        effort: Effort,
        refused: Callable[[Family], bool] = lambda family: False,
        orders: Orders | None = None,
        begun: Begun | None = None,
    ) -> None:
        self.problem, self.effort = problem, effort
        self._refused = refused
        self._begun = begun or Begun()
        self._orders = orders or Orders()
        self._plays = 0
        self.found = Found()
        self._best: dict[tuple[object, ...], _Best] = {}
        self._fastest = float("inf")  # seconds of the best candidate that fits

    @collector_paused()
    def run(self) -> Found:
        """Look at all families that may be the fastest, improve the best, and return what was found."""
        for family in sorted(families(self.problem), key=lambda each: (each.estimate, each.place)):
            if family.bound >= self._fastest * (1 - TIE) or self._is_settled(family):
                continue
            if family.estimate >= self._fastest * _HOPELESS and self._plays > self.effort.plays * _CHEAP:
                break
            if self._plays > self.effort.plays:
                self.found.complete = False
                break
            best = self._started(family, self._limit(family))
            if best is not None and best.fits:
                self._fastest = min(self._fastest, best.seconds)
        open_ones = [each for each in self._best.values() if each.starts is not None]
        for number, each in enumerate(sorted(open_ones, key=lambda each: (each.promise, _rank(each)))):
            if number >= self.effort.improved and not self._is_cheap:
                break
            if each.promise <= self._fastest * _NEAR and each.family.bound < self._fastest:
                self._improve(each)
        self.found.answers = [self._answer(each) for each in sorted(self._best.values(), key=_rank)]
        return self.found

    def _is_settled(self, family: Family) -> bool:
        """Whether neither memory nor the update matters where replicas share nothing: ZeRO saves nothing else.

        States in the host's memory save memory alone.
        """
        layout = _key(family)[:-2]
        if family.in_host:
            others = (self._best.get((*layout, zero, False)) for zero in (None, family.zero))
            return any(each is not None and each.is_free for each in others)
        if family.zero is None or len(self.problem.zero) < 2:
            return False
        plain = self._best.get((*layout, None, False))
        if plain is None or not plain.is_free:
            return False
        update = sum(plain.table.setting.division.gradient) * self.problem.step_seconds_per_byte / family.pipeline
        return update < TIE * plain.seconds

    def again(self, answer: PlanningAnswer, excess: float) -> PlanningAnswer | None:
        """The best candidate of an answer's family if each rank needs so many bytes more than was estimated.

        Families that differ in where optimizer states are alone are looked at, too.

        Returns:
            None if none fits then.
        """
        before = self._best[_key(answer)].family
        found = list[_Best]()
        for zero, in_host in _places_of_states(self.problem, before.data):
            family = replace(before, zero=zero, in_host=in_host)
            best = self._started(family, self._limit(family) - max(excess, 0.0))
            if best is not None:
                self._improve(best)
                found += [best] if best.fits else []
        return self._answer(min(found, key=_rank)) if found else None

    @property
    def _is_cheap(self) -> bool:
        """Whether so little was played that more may be tried than what is most likely to help."""
        return self._plays <= self.effort.plays * _CHEAP

    def _limit(self, family: Family) -> float:
        return float(self.problem.memory[family.pipeline * family.data * family.tensor])

    def _started(self, family: Family, limit: float) -> _Best | None:
        if family.order is not None:
            most = _ACTIONS * family.pipeline * family.order.chunks * family.microbatches
            if most > self.effort.actions:
                self.found.complete = False
                return None
        order = self._orders.of(family.order, family.pipeline, family.microbatches)
        if order is None or order.stages > len(self.problem.layers):
            return None
        if self._refused(family):
            return None
        boundaries, division = (self.problem.fixed or {}).get("boundaries"), _division(self.problem, family.tensor)
        asked = *_key(family), limit, id(division), tuple(boundaries or ())
        before = self._plays, self.found.evaluated
        if asked not in self._begun.known:
            best = self._first_of(family, order, boundaries, limit)
            self._begun.known[asked] = best, self._plays - before[0], self.found.evaluated - before[1]
        begun, plays, evaluated = self._begun.known[asked]
        self._plays, self.found.evaluated = before[0] + plays, before[1] + evaluated
        self.found.families += 1
        best = self._best[_key(family)] = replace(begun, family=family)
        return best

    def _first_of(self, family: Family, order: PlayedOrder, boundaries: Sequence[int] | None, limit: float) -> _Best:
        """The best of the candidates from which the search of a family starts."""
        table = StageTable(self.problem, _setting(self.problem, family))
        ways = range(len(table.setting.division.ways))
        is_whole = boundaries is None and num_of_all(len(self.problem.layers), order, len(ways)) <= _WHOLE
        if boundaries is not None:
            candidates = _with_cut(table, order, boundaries, ways)
        elif is_whole:
            candidates = all_of(order, table, ways)
        else:
            candidates = starts(table, order, limit, ways)
        best = self._of_all(family, table, order, candidates, limit)
        if is_whole or boundaries is not None or order.compiled is None:
            best.starts = None  # there is nothing to improve
        return best

    def _of_all(
        self, family: Family, table: StageTable, order: PlayedOrder, candidates: Candidates, limit: float
    ) -> _Best:
        """The fastest of the candidates that fit, else the one with the lowest peak."""
        seconds, peaks = self._played(table, order, candidates)
        most = peaks.max(axis=0)
        fitting = most <= limit
        number = int(np.argmin(np.where(fitting, seconds, np.inf)) if fitting.any() else np.argmin(most))
        chosen = float(seconds[number]), float(most[number])
        is_free = bool(seconds[number] == seconds.min())
        promise = _weighed(seconds, peaks, limit, _WEIGHTS[0])
        first = np.argsort(promise, kind="stable")[:_STARTS]
        starts = Candidates(candidates.cuts[:, first], candidates.kept[:, first])
        only = candidates.only(number)
        return _Best(family, table, order, only, *chosen, limit, is_free, starts, float(promise[first[0]]))

    def _played(self, table: StageTable, order: PlayedOrder, candidates: Candidates) -> tuple[Numbers, Numbers]:
        """Seconds of each candidate, and the bytes of each rank."""
        self._plays += order.num_actions * candidates.count
        self.found.evaluated += candidates.count
        return table.step_seconds(candidates, order), table.peaks(candidates, order)

    def _improve(self, best: _Best) -> None:
        """Change one thing at a time, the one that helps most, until nothing helps.

        That begins with the best; where little was played so far, with other candidates, too, and where none fits, with
        the most promising one.
        """
        if best.starts is None:
            return
        self._descend(best, best.candidate, _WEIGHTS[-1:])
        for number in range(best.starts.count):
            if not self._is_cheap and (best.fits or number):
                break
            self._descend(best, best.starts.only(number), _WEIGHTS)
        if best.fits:
            self._fastest = min(self._fastest, best.seconds)

    def _descend(self, best: _Best, candidate: Candidates, weights: Sequence[float]) -> None:
        """Go from a candidate to its best neighbour while there is a better one, and keep the best that fits.

        One that does not fit counts as slower by the part of the memory that its ranks lack, at first a little, so that
        the way to a fast one that fits may lead through others.
        """
        ways, table, order = range(len(best.table.setting.division.ways)), best.table, best.order
        for weight in weights:
            here = float(_weighed(*self._played(table, order, candidate), best.limit, weight)[0])
            for _ in range(_ROUNDS):
                if self._plays > self.effort.plays:
                    self.found.complete = False
                    return
                around = neighbours(candidate, order, table, ways)
                seconds, peaks = self._played(table, order, around)
                most = peaks.max(axis=0)
                least = int(np.argmin(np.where(most <= best.limit, seconds, np.inf)))
                if most[least] <= best.limit and (not best.fits or seconds[least] < best.seconds * (1 - _SAME)):
                    best.candidate, best.seconds = around.only(least), float(seconds[least])
                    best.peak = float(most[least])
                weighed = _weighed(seconds, peaks, best.limit, weight)
                next_one = int(np.argmin(weighed))
                if weighed[next_one] >= here * (1 - _SAME):
                    break
                candidate, here = around.only(next_one), float(weighed[next_one])

    def _answer(self, best: _Best) -> PlanningAnswer:
        cut = best.candidate.cuts[:, 0].tolist()
        ways = [best.table.setting.division.ways[way] for way in best.candidate.kept[:, 0].tolist()]
        family = best.family
        return PlanningAnswer(
            "joint",
            family.pipeline,
            family.data,
            family.tensor,
            family.microbatches,
            family.order,
            tuple((first, last - 1) for first, last in zip(cut, cut[1:], strict=False)),
            tuple(way.name for way in ways),
            family.zero,
            best.seconds,
            best.peak,
            moved=tuple(stage for stage, way in enumerate(ways) if way.moved),
            states_in_host=family.in_host,
        )


def _weighed(seconds: Numbers, peaks: Numbers, limit: float, weight: float) -> Numbers:
    """Seconds, longer by ``weight`` times the parts of its memory that each rank lacks."""
    lacks = np.maximum(peaks / max(limit, 1.0) - 1, 0.0).sum(axis=0)  # what every rank holds may leave no byte
    found: Numbers = seconds * (1 + weight * lacks)
    return found


def _rank(best: _Best) -> tuple[bool, float, int]:
    return not best.fits, best.seconds if best.fits else best.peak - best.limit, best.family.place


def _key(of: Family | PlanningAnswer) -> tuple[object, ...]:
    in_host = of.in_host if isinstance(of, Family) else of.states_in_host
    return of.pipeline, of.data, of.tensor, of.microbatches, of.order, of.zero, in_host


def _setting(problem: PlanningProblem, family: Family) -> Setting:
    division, samples = _division(problem, family.tensor), _samples(problem, family)
    return Setting(division, samples, family.microbatches, family.data, family.zero, family.in_host)


def _with_cut(table: StageTable, order: PlayedOrder, boundaries: Sequence[int], ways: Sequence[int]) -> Candidates:
    """The candidates with a given cut; those of no order with as many stages are none."""
    cut = (0, *boundaries, table.num_layers)
    if len(cut) != order.stages + 1:
        cut = tuple(table.num_layers * stage // order.stages for stage in range(order.stages + 1))
    kept = np.array([[way] * order.stages for way in ways], dtype=np.int64).T
    return Candidates(np.repeat(np.array(cut, dtype=np.int64)[:, None], len(ways), axis=1), kept)


def families(problem: PlanningProblem) -> Iterator[Family]:
    """Every layout with its orders, ZeRO and micro-batches, those with fewer stages and simpler orders first."""
    fixed, place, seconds = problem.fixed or {}, 0, _FamilySeconds(problem)
    for world in divisors(problem.ranks):
        for pipeline, tensor in _degrees(problem, world):
            data = world // (pipeline * tensor)
            degrees = {"pipeline": pipeline, "data": data, "tensor": tensor}
            if any(fixed.get(key, value) != value for key, value in degrees.items()):
                continue
            for microbatches in _microbatches(problem, pipeline, data):
                for order in _orders(problem, pipeline):
                    for zero, in_host in _places_of_states(problem, data):
                        place += 1
                        family = Family(pipeline, data, tensor, microbatches, order, zero, 0.0, 0.0, place, in_host)
                        least = seconds.at_least(family)
                        yield replace(family, bound=least, estimate=max(least, seconds.estimate(family)))


def lower_bound(problem: PlanningProblem, family: Family) -> float:
    """Seconds that no step of a family can undercut.

    The mean rank computes its share, sums its gradients and updates; a rank has at least one layer; and the pipeline
    must be filled.
    """
    return _FamilySeconds(problem).at_least(family)


class _FamilySeconds:
    """Bounds and estimates of the seconds of a problem's families; sums over layers are made once for each number of
    samples, because thousands of families have few of them."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._computes = cache(self._computes_of)
        self._ways = cache(self._ways_of)
        self._states = cache(self._states_of)
        self._gradients = {each.tensor: sum(each.gradient) for each in problem.divisions}

    def at_least(self, family: Family) -> float:
        """See :func:`lower_bound`."""
        problem, pipeline, count = self._problem, family.pipeline, family.microbatches
        whole, longest = self._computes(family.tensor, _samples(problem, family))
        computes, engine = count * whole / pipeline, 2 * count * problem.overhead
        bound = max(
            engine + computes + self._after(family) / pipeline,
            count * longest / copies_in(family.order),
            computes * _fill(family.order, pipeline, count),
        )
        if problem.cores is not None:
            bound = max(bound, family.data * family.tensor * count * whole / problem.cores)
        return bound

    def estimate(self, family: Family) -> float:
        """Seconds by the closed form of the order for equal stages, with the fastest way to keep that about fits."""
        problem, pipeline = self._problem, family.pipeline
        limit = problem.memory[pipeline * family.data * family.tensor]
        states = self._states(family.tensor, family.data, family.zero, family.in_host) / pipeline
        span, most = _closed_form(family.order, pipeline, family.microbatches)
        forward, ways = self._ways(family.tensor, _samples(problem, family))
        fitting = (each for each in ways if states + most * each[1] / pipeline + each[2] <= limit)
        backward, *_ = next(fitting, ways[-1])
        actions = 2 * (family.order.chunks if family.order is not None else 1)
        a_microbatch = (forward + backward) / pipeline + actions * problem.overhead
        return family.microbatches * a_microbatch * span + self._after(family) / pipeline

    def _computes_of(self, tensor: int, samples: float) -> tuple[float, float]:
        """Seconds of all layers' forwards and backwards for a micro-batch, and of the longest of them."""
        division = _division(self._problem, tensor)
        kept = division.kept[0]
        parts = zip(division.forward, kept.backward, kept.input_gradient, kept.weight_gradient, strict=True)
        each = [f.of(samples) + min(b.of(samples), i.of(samples) + w.of(samples)) for f, b, i, w in parts]
        return sum(each), max(each)

    def _ways_of(self, tensor: int, samples: float) -> tuple[float, list[tuple[float, float, float]]]:
        """Seconds of all layers' forwards; for each way to keep, seconds of backwards, bytes that are kept, and the
        most bytes that a layer takes beside them."""
        division = _division(self._problem, tensor)
        ways = [
            (
                sum(line.of(samples) for line in kept.backward),
                sum(line.of(samples) for line in kept.saved),
                max(line.of(samples) for line in kept.working),
            )
            for kept in division.ways
        ]
        return sum(line.of(samples) for line in division.forward), ways

    def _states_of(self, tensor: int, data: int, zero: int | None, in_host: bool) -> float:
        return sum(state_bytes(Setting(_division(self._problem, tensor), 0.0, 1, data, zero, in_host)))

    def _after(self, family: Family) -> float:
        """Seconds of the sums of all gradients and of the update, if one rank had all layers."""
        problem, data, gradients = self._problem, family.data, self._gradients[family.tensor]
        link = problem.links.replicas([0], data, family.tensor)  # of others the ring may be on more nodes
        sums = 2 * (data - 1) / data * gradients / link.bytes_per_second if data > 1 and link.bytes_per_second else 0.0
        return sums + gradients * _setting(problem, family).update_seconds_per_byte(problem)


def _division(problem: PlanningProblem, tensor: int) -> Division:
    return next(each for each in problem.divisions if each.tensor == tensor)


def _samples(problem: PlanningProblem, family: Family) -> float:
    return problem.batch / (family.data * family.microbatches)


@cache
def _closed_form(order: Order | None, pipeline: int, microbatches: int) -> tuple[float, float]:
    """By how much a step is longer than its computes, and the micro-batches that the fullest rank keeps, as whole
    shares of it; for equal stages."""
    if order is None:
        return 1.0, 1.0
    formulas = SPECS[order.schedule].formulas
    if formulas is None:
        return 1 + (pipeline - 1) / order.chunks / microbatches, float(min(pipeline, microbatches))
    known = {"D": pipeline, "T": microbatches, "v": order.chunks, "F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

    def of(formula: str, rank: int = 0) -> float:
        names = {"__builtins__": {}, "max": max, "min": min, "abs": abs}
        return float(eval(formula, names, {**known, "r": rank}))  # noqa: S307 - the catalogue's own texts

    span = of(formulas.span) / (3 * microbatches)
    return span, max(of(formulas.peak_activations, rank) for rank in range(pipeline))


def _fill(order: Order | None, pipeline: int, microbatches: int) -> float:
    """The least that filling and draining the pipeline adds, as a factor of the time in which all ranks compute.

    With w_s seconds of stage s for a micro-batch, no flushed order in one direction with whole backwards is shorter
    than the largest of sum(w_a for a <= s) + (T - 1) w_s. The least of this over all cuts has w_s in a geometric row.
    """
    if order is None or order.schedule not in _WHOLE_BACKWARDS:
        return 1.0
    if microbatches == 1:
        return float(pipeline)
    return pipeline / (microbatches * (1 - (1 - 1 / microbatches) ** pipeline))


_WHOLE_BACKWARDS = ("naive", "gpipe", "1f1b", "1f1b_eager", "varuna")


def divisors(number: int) -> list[int]:
    """All numbers that divide it, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _places_of_states(problem: PlanningProblem, data: int) -> list[tuple[int | None, bool]]:
    """The stages of ZeRO that replicas may have, and whether states are in the host's memory, which one rank may have,
    too."""
    found = [(zero, False) for zero in (problem.zero if data > 1 else problem.zero[:1])]
    if problem.host_update is not None:
        found += [(zero, True) for zero in problem.zero if zero]
    return found


def _degrees(problem: PlanningProblem, world: int) -> Iterator[tuple[int, int]]:
    degrees = {division.tensor for division in problem.divisions}
    for pipeline in divisors(world):
        for tensor in divisors(world // pipeline):
            if pipeline <= len(problem.layers) and tensor in degrees:
                yield pipeline, tensor


def _microbatches(problem: PlanningProblem, pipeline: int, data: int) -> list[int]:
    """Numbers of micro-batches of equal size; where the batch has few divisors, one with sizes that differ by one."""
    if problem.microbatches is not None:
        return [problem.microbatches // data] if problem.microbatches % data == 0 else []
    asked = (problem.fixed or {}).get("microbatches")
    if asked is not None:
        return [asked] if asked * data <= problem.batch else []
    if problem.batch % data:
        return []
    share = problem.batch // data
    found = divisors(share)
    if pipeline == 1:
        return found
    few = found if len(found) > 2 else sorted({*found, min(share, 4 * pipeline)})
    return [each for each in few if each <= _MOST * pipeline]


def _orders(problem: PlanningProblem, pipeline: int) -> list[Order | None]:
    if pipeline == 1:
        return [None]
    return [order for order in problem.orders if order.chunks * pipeline <= len(problem.layers)]
