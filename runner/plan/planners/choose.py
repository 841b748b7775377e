"""``parallelism=auto``: the best answers of a search become whole plans, and these decide.

A search estimates. Its best answers are requests that a user could type, and each is planned as such: the walk of its
memory and the play of its program are exact. What a plan needs more than was estimated is told to the search, which
then looks for the best that keeps to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runner.errors import Problem, RequestError
from runner.plan.collector import collector_paused
from runner.plan.planners.joint import EFFORTS, TIE, Begun, Effort, Family, JointSearch
from runner.plan.planners.orders import Orders
from runner.plan.planners.values import Order, PlanningAnswer, PlanningProblem
from runner.plan.values import RunPlan
from runner.schedule.catalogue.registry import SPECS

__all__ = [
    "FASTEST",
    "FOUND_FIRST",
    "NOT_TOLD_APART",
    "Choice",
    "Chosen",
    "Judge",
    "Refuses",
    "choose",
    "fewest_ranks_that_fit",
    "simplest_first",
]

Judge = Callable[[Mapping[str, Any]], RunPlan]
"""Plans the request with these keys; raises RequestError if a rule forbids it."""

Refuses = Callable[[Family], bool]
"""Whether a rule forbids a layout with an order and ZeRO, whatever the cut."""

_ATTEMPTS = 6  # plans of one family, each with what the one before needed more than was estimated
FOUND_FIRST = "found first"
"""What is told of an answer that seemed to be the best until it was planned as it would be typed."""

FASTEST = "the fastest"
"""What is told of the fastest answer if a simpler one is taken."""

NOT_TOLD_APART = 0.02
"""The part of a step below which two plans of the same layers are as fast: what an overlap, messages and the engine's
own work take is not known better than that, while an error in a layer's seconds is in both."""

_LOOKS = 4  # times the answers that are planned: as many are looked at
_PLAIN = "1f1b"
_UNSURE = 1.05  # times the best plan's step: what is estimated to be longer is not planned


@dataclass(frozen=True)
class Choice:
    """An answer that was planned.

    Args:
        answer: the answer.
        keys: the keys that ask for it, with their values.
        plan: its whole plan.
        told: for a runner-up, in what it differs.
    """

    answer: PlanningAnswer
    keys: Mapping[str, Any]
    plan: RunPlan
    told: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.plan.time.step_seconds

    def cost(self, overhead: float) -> float:
        """Seconds of a step with what the engine takes for each action of a rank, which no plan counts."""
        return self.seconds + overhead * max(map(len, self.plan.schedule.actions))

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(self.plan.peak_memory_bytes)


@dataclass
class Chosen:
    """The result for a user.

    Args:
        best: the shortest step that fits; the one that lacks least if nothing fits.
        runners_up: others that differ in kind, the fastest first.
        searched: layouts with an order, ZeRO and micro-batches that were looked at.
        evaluated: candidates that were played.
        complete: whether no limit of work ended the search.
        refusals: why answers could not be planned.
        planned: every answer that was planned.
    """

    best: Choice
    runners_up: list[Choice] = field(default_factory=list)
    searched: int = 0
    evaluated: int = 0
    complete: bool = True
    refusals: list[Problem] = field(default_factory=list)
    planned: list[Choice] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether there is a layout that fits."""
        return self.best.plan.fits


@collector_paused()
def choose(
    problem: PlanningProblem,
    judge: Judge,
    *,
    confirm: Judge,
    refuses: Refuses,
    effort: str = "normal",
    keys_of: Callable[[PlanningAnswer], Mapping[str, Any]],
    progress: Callable[[str], None] = lambda line: None,
) -> Chosen:
    """Search, plan the best answers, and find others that differ in kind.

    Args:
        problem: the problem.
        judge: plans requests, by seconds that may lie between those that are known.
        confirm: plans a request as a user would type it.
        refuses: what rules forbid.
        effort: a name of :data:`EFFORTS`.
        keys_of: the keys that ask for an answer.
        progress: is told what is done.

    Raises:
        RequestError: no layout can be planned; the reasons are those of the best answers.
    """
    chooser = _Chooser(problem, judge, refuses, keys_of, progress)
    best = chooser.best(problem if problem.knows_host else problem.without_host, EFFORTS[effort])
    if not problem.knows_host and (best is None or not best.plan.fits):
        best = chooser.best(problem, EFFORTS[effort])
    if best is None:
        raise RequestError(chooser.chosen_problems())
    found = Chosen(best, [], chooser.searched, chooser.evaluated, chooser.complete, chooser.refusals)
    if not best.plan.fits:
        return replace(found, best=replace(best, plan=confirm(best.keys)))
    confirm = _remembered(confirm)
    best = _fitting_as_typed(problem, best, chooser, confirm, EFFORTS[effort])
    confirmed = _confirmed([best, *chooser.others(best)], confirm, chooser.cost)
    best, *others = simplest_first(confirmed, confirm, chooser.cost)
    found.best, found.searched, found.evaluated = best, chooser.searched, chooser.evaluated
    found.runners_up = sorted(others, key=lambda each: (not each.plan.fits, chooser.cost(each)))
    found.planned = chooser.planned
    return found


def fewest_ranks_that_fit(
    problem: PlanningProblem,
    counts: Sequence[int],
    judge: Judge,
    refuses: Refuses,
    keys_of: Callable[[PlanningAnswer], Mapping[str, Any]],
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Choice | None, int]:
    """The best plan of the fewest ranks with which something fits, and how many layouts were looked at.

    Args:
        problem: the problem of the most ranks.
        counts: numbers of ranks, the smallest first; each divides the most.
        judge, refuses, keys_of, progress: see :func:`choose`.

    Returns:
        The plan that lacks least if nothing fits; None if nothing can be planned.
    """
    chooser = _Chooser(problem, judge, refuses, keys_of, progress)
    made = list[Choice]()
    for ranks in counts:
        best = chooser.best(replace(problem, ranks=ranks), EFFORTS["quick"])
        if best is not None:
            made.append(best)
            if best.plan.fits:
                return best, chooser.searched
    return min(made, key=_lack, default=None), chooser.searched


def _remembered(judge: Judge) -> Judge:
    known: dict[str, RunPlan] = {}

    def plan(keys: Mapping[str, Any]) -> RunPlan:
        name = repr(sorted(keys.items()))
        if name not in known:
            known[name] = judge(keys)
        return known[name]

    return plan


def _fitting_as_typed(
    problem: PlanningProblem, first: Choice, chooser: _Chooser, confirm: Judge, effort: Effort
) -> Choice:
    """A choice that fits as it would be typed; the first one if none is found.

    The judge's memory of a size that lies between two known ones may be a little less than that of the plan as typed.
    What is lacking is taken off what was estimated, and the search is made again for so much memory.
    """
    best = first
    for _ in range(_ATTEMPTS):
        if (lack := confirm(best.keys).lacks_bytes) <= 0:
            return best
        least = int(best.answer.peak_bytes or 0) - lack
        problem = replace(problem, memory={ranks: min(room, least) for ranks, room in problem.memory.items()})
        found = chooser.best(problem, effort)
        if found is None or not found.plan.fits:
            break
        best = found
    return first


def _confirmed(choices: list[Choice], confirm: Judge, cost: Callable[[Choice], float]) -> list[Choice]:
    """The choices with the best one in front, which is planned as it would be typed, and so is what seemed better."""
    pool, done = list(choices), set[int]()
    while True:
        at = min(
            range(len(pool)), key=lambda each: (not pool[each].plan.fits, cost(pool[each]) * (1 - TIE * (each == 0)))
        )
        if at in done:
            break
        done.add(at)
        pool[at] = replace(pool[at], plan=confirm(pool[at].keys))
    first = pool[0] if at == 0 else replace(pool[0], told=FOUND_FIRST)
    rest = [first, *pool[1:]]
    return [replace(rest[at], told=""), *(each for place, each in enumerate(rest) if place != at)]


def simplest_first(choices: list[Choice], confirm: Judge, cost: Callable[[Choice], float]) -> list[Choice]:
    """The choices, of which the first is the fastest and planned as it would be typed, with the simplest in front that
    is as fast as is known, planned so, too."""
    pool, done = list(choices), {0}
    while True:
        taken = _simplest([each for each in pool if each.plan.fits], cost, NOT_TOLD_APART)
        at = next((place for place, each in enumerate(pool) if each is taken), 0)
        if at in done:
            break
        done.add(at)
        pool[at] = replace(pool[at], plan=confirm(pool[at].keys))
    if at == 0:
        return pool
    rest = [each for place, each in enumerate(pool) if place not in (0, at)]
    return [replace(pool[at], told=""), replace(pool[0], told=FASTEST), *rest]


class _Chooser:
    def __init__(
        self,
        problem: PlanningProblem,
        judge: Judge,
        refuses: Refuses,
        keys_of: Callable[[PlanningAnswer], Mapping[str, Any]],
        progress: Callable[[str], None],
    ) -> None:
        self._problem, self._judge, self._refuses = problem, judge, refuses
        self._keys_of, self._progress = keys_of, progress
        self._orders, self._begun = Orders(), Begun()
        self._plans: dict[str, Choice | None] = {}
        self.searched = self.evaluated = 0
        self.complete = True
        self.refusals: list[Problem] = []

    @property
    def planned(self) -> list[Choice]:
        """Every answer that was planned."""
        return [each for each in self._plans.values() if each is not None]

    def chosen_problems(self) -> list[Problem]:
        """Why nothing could be planned."""
        if self.refusals:
            return self.refusals
        rule = "has no layout that keeps what was named"
        why = "Degrees must divide the number of ranks, and micro-batches the samples of a replica"
        return [Problem("parallelism", "auto", rule, why, f"parallelism.ranks={self._problem.ranks * 2}")]

    def best(self, problem: PlanningProblem, effort: Effort) -> Choice | None:
        """The best plan of a problem; the one that lacks least if none fits; None if none can be planned."""
        self._progress(f"looking at layouts of {problem.ranks} ranks ...")
        search = JointSearch(problem, effort, self._refuses, self._orders, self._begun)
        found = search.run()
        self.searched += found.families
        self.evaluated += found.evaluated
        self.complete &= found.complete
        made: list[Choice] = []
        fitting = [each for each in found.answers if self._may_fit(each)]
        finalists, judged = deque(_finalists(fitting or found.answers)[: effort.judged * _LOOKS]), 0
        doubtful = set[int]()
        while finalists and judged < effort.judged:
            answer = finalists.popleft()
            least = min((self.cost(each) for each in made if each.plan.fits), default=float("inf"))
            if answer.seconds > least * _UNSURE:
                break
            known = _as_needed(search, answer, made) if fitting and id(answer) not in doubtful else answer
            if known is None:  # planned after the others, in case it needs less
                doubtful.add(id(answer))
                finalists.append(answer)
                continue
            judged += 1
            self._progress(f"planning layout {judged} of at most {effort.judged} ...")
            made += self._judged(search, known)
        fit = [each for each in made if each.plan.fits]
        return _simplest(fit, self.cost, TIE) or min(made, key=_lack, default=None)

    def cost(self, choice: Choice) -> float:
        """Seconds of a step, with the engine's."""
        return choice.cost(self._problem.overhead)

    def _may_fit(self, answer: PlanningAnswer) -> bool:
        return (answer.peak_bytes or 0.0) <= self._problem.memory[answer.world_size]

    def _judged(self, search: JointSearch, answer: PlanningAnswer) -> Iterator[Choice]:
        """The plan of an answer and, as long as it does not fit, of the next one of its family."""
        current: PlanningAnswer | None = answer
        for _ in range(_ATTEMPTS):
            made = None if current is None else self._planned(current)
            if made is None or current is None:
                return
            yield made
            if made.plan.fits or current.peak_bytes is None:
                return
            current = search.again(current, made.peak - current.peak_bytes)

    def _planned(self, answer: PlanningAnswer) -> Choice | None:
        keys = self._keys_of(answer)
        name = repr(sorted(keys.items()))
        if name not in self._plans:
            try:
                self._plans[name] = Choice(answer, keys, self._judge(keys))
            except RequestError as error:
                self.refusals += [each for each in error.problems if each not in self.refusals]
                self._plans[name] = None
        return self._plans[name]

    def others(self, best: Choice) -> Iterator[Choice]:
        """The best plans of other kinds, each once."""
        told = {repr(sorted(best.keys.items()))}
        for words, problem in _other_kinds(self._problem, best.answer):
            made = self.best(problem, EFFORTS["quick"])
            if made is not None and (name := repr(sorted(made.keys.items()))) not in told:
                told.add(name)
                yield replace(made, told=words)


def _as_needed(search: JointSearch, answer: PlanningAnswer, made: Sequence[Choice]) -> PlanningAnswer | None:
    """The answer, or the next one of its family that fits if it needs as much more than estimated as others whose
    states are at the same place; None if none fits then."""

    def place(one: PlanningAnswer) -> tuple[object, ...]:
        return one.zero, one.states_in_host, one.data > 1

    alike = (each for each in made if place(each.answer) == place(answer))
    more = min((each.peak - (each.answer.peak_bytes or 0.0) for each in alike), default=0.0)
    limit = search.problem.memory[answer.world_size]
    return answer if (answer.peak_bytes or 0.0) + more <= limit else search.again(answer, more)


def _finalists(answers: list[PlanningAnswer]) -> list[PlanningAnswer]:
    """The best of each layout and order first, and then those with other numbers of micro-batches."""
    kinds, first, rest = set[tuple[object, ...]](), list[PlanningAnswer](), list[PlanningAnswer]()
    for answer in answers:
        kind = answer.pipeline, answer.data, answer.tensor, answer.order
        (rest if kind in kinds else first).append(answer)
        kinds.add(kind)
    return [*first, *rest]


def _lack(choice: Choice) -> tuple[int, float]:
    return choice.plan.lacks_bytes, choice.seconds


def _simplest(choices: list[Choice], cost: Callable[[Choice], float], within: float) -> Choice | None:
    """The fastest; of those that are longer by less than a part, the one with fewest ranks, and then the simplest."""
    if not choices:
        return None
    fastest = min(map(cost, choices))
    names = list(SPECS)

    def simple(choice: Choice) -> tuple[float, ...]:
        answer = choice.answer
        order = answer.order
        sizes = [last - first for first, last in answer.stages]
        return (
            answer.world_size,
            len(answer.moved) + answer.states_in_host,
            len(answer.stages),
            names.index(order.schedule) if order is not None else -1,
            sum(each != "none" for each in answer.kept),
            answer.zero or 0,
            max(sizes) - min(sizes),
            cost(choice),
        )

    return min((each for each in choices if cost(each) <= fastest * (1 + within)), key=simple)


def _other_kinds(problem: PlanningProblem, best: PlanningAnswer) -> Iterator[tuple[str, PlanningProblem]]:
    """Problems whose answers differ in kind from the best."""
    fixed = dict(problem.fixed or {})

    def but(**more: Any) -> PlanningProblem:
        return replace(problem, fixed=fixed | more)

    if best.tensor > 1 and "tensor" not in fixed:
        yield "no tensor", but(tensor=1)
    if best.pipeline > 1 and "pipeline" not in fixed:
        yield "no pipeline", but(pipeline=1)
    if best.pipeline == 1 and problem.ranks > 1 and "pipeline" not in fixed:
        yield "a pipeline", but(pipeline=next(each for each in range(2, 64) if problem.ranks % each == 0))
    if best.moved or best.states_in_host:
        yield "no offloading", problem.without_host
    if any(each != "none" for each in best.kept) and len(problem.divisions[0].kept) > 1:
        kept_all = tuple(
            replace(each, kept=each.kept[:1], moved=tuple(way for way in each.moved if way.name == each.kept[0].name))
            for each in problem.divisions
        )
        yield "no recomputation", replace(problem, divisions=kept_all)
    if best.order is not None and best.order.schedule != _PLAIN and Order(_PLAIN, 1) in problem.orders:
        yield "1f1b", replace(problem, orders=(Order(_PLAIN, 1),), fixed=fixed | {"pipeline": best.pipeline})
    if best.zero and None in problem.zero:
        yield "no ZeRO", replace(problem, zero=(None,))
    if problem.ranks % 2 == 0:
        yield "half the ranks", replace(problem, ranks=problem.ranks // 2)
