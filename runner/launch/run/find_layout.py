"""``parallelism=auto``: finds the layout of a request, as words that a user could have typed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runner.config.compose.resolve import keys_given, resolve_with_layers
from runner.config.free_keys import FREE_NAMES, freed_keys, held_keys
from runner.config.links import with_measured_link
from runner.config.rules.sections import rules
from runner.config.schema import PlannerConfig, RunConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.launch.mpi import num_ranks
from runner.launch.run.layout_judge import LayoutJudge, without_search

if TYPE_CHECKING:
    from runner.plan.planners.choose import Choice, Chosen
    from runner.plan.planners.values import PlanningProblem
    from runner.plan.values import RunPlan

__all__ = [
    "AUTO",
    "Compared",
    "FoundLayout",
    "asked_problem",
    "asks_for_layout",
    "checked_search",
    "compare_planners",
    "find_layout",
    "ranks_to_share",
    "remedies",
]

AUTO = "parallelism=auto"
_DEGREES = ("parallelism.pipeline", "parallelism.data", "parallelism.tensor")
_SUBSTITUTIONS = "kernels.substitutions"
_OF_UNEQUALS = {
    "replicas": "The search looks at layouts with one rank for each stage of a replica",
    "shares": "The search looks at micro-batches of one size",
    "placement": "The search looks at the placements of published orders",
    "starts": "The search looks at published orders",
}  # keys of the schedule that the search does not know -> why
_SMALL_GAIN = 0.1  # of a step, within which plans are uncertain: no reason to profile the model for each tensor degree


@dataclass(frozen=True)
class FoundLayout:
    """A layout that was chosen.

    Args:
        words: the whole request, without ``parallelism=auto``.
        chosen: the result of the search.
        problem: what was searched.
        judge: plans requests that differ from it.
    """

    words: tuple[str, ...]
    chosen: Chosen
    problem: PlanningProblem
    judge: LayoutJudge


def asks_for_layout(words: Sequence[str]) -> bool:
    """Whether a command line leaves the layout to the runner."""
    return AUTO in [word.lstrip("+") for word in words]


def find_layout(
    words: Sequence[str], progress: Callable[[str], None] = lambda line: None, *, every_degree: bool = False
) -> FoundLayout:
    """Search the layout of a request.

    Args:
        words: the command line, with ``parallelism=auto``.
        progress: is told what is done.
        every_degree: whether layouts of divided layers are looked at, also where they could hardly be faster: each
            number of ranks that divide layers is a profile of its own, which may take a minute.

    Raises:
        RequestError: the request has problems, or no layout can be planned.
    """
    if not every_degree and not any(word.lstrip("+").startswith(("planner=", "planner.")) for word in words):
        found = _of_whole_layers(words, progress)
        if found is not None:
            return found
    config, problem, judge = asked_problem(words, progress)
    if config.planner.name != "joint":
        return _of_published(config.planner, problem, judge, progress)
    return _chosen(config, problem, judge, progress)


def _of_whole_layers(words: Sequence[str], progress: Callable[[str], None]) -> FoundLayout | None:
    """The layout without divided layers if it is nearly as fast as any can be; None: layers should be divided, too."""
    from runner.plan.planners.joint import EFFORTS, JointSearch

    config, problem, judge = asked_problem(words, progress, divides=False)
    if problem.unprofiled:
        looked = JointSearch(problem, EFFORTS["quick"], judge.refuses).run().answers
        fitting = (each.seconds for each in looked if (each.peak_bytes or 0.0) <= problem.memory[each.world_size])
        if _gain(problem, min(fitting, default=float("inf"))) > _SMALL_GAIN:
            return None
    found = _chosen(config, problem, judge, progress)
    if not problem.unprofiled:
        return found
    gain = _gain(problem, found.chosen.best.seconds)
    if not found.chosen.fits or gain > _SMALL_GAIN:
        return None
    degrees = ", ".join(f"parallelism.tensor={each}" for each in problem.unprofiled)
    told = f"{degrees} (ranks that always compute would save {gain:.1%}; --why looks at all)"
    return replace(found, problem=replace(problem, left_out=(*problem.left_out, told)))


def _gain(problem: PlanningProblem, seconds: float) -> float:
    """The share of a step that the best layout could save."""
    return max(0.0, 1 - problem.busy_seconds / seconds)


def _chosen(
    config: RunConfig, problem: PlanningProblem, judge: LayoutJudge, progress: Callable[[str], None]
) -> FoundLayout:
    from runner.plan.planners.choose import choose

    chosen = choose(
        problem,
        judge.plan,
        confirm=judge.typed,
        refuses=judge.refuses,
        effort=config.parallelism.search,
        keys_of=judge.keys,
        progress=progress,
    )
    return FoundLayout(tuple(judge.words(chosen.best.keys)), chosen, problem, judge)


def asked_problem(
    words: Sequence[str], progress: Callable[[str], None] = lambda line: None, *, divides: bool = True
) -> tuple[RunConfig, PlanningProblem, LayoutJudge]:
    """The request of a command line with ``parallelism=auto``, its planning problem, and the judge of answers.

    Args:
        words: the command line.
        progress: is told what is done.
        divides: see :func:`runner.plan.planners.problem.planning_problem`.

    Raises:
        RequestError: the request has problems.
    """
    from runner.launch.run.machines import this_machine
    from runner.plan.draft.draft import Machine
    from runner.plan.planners.problem import expected_profiles, planning_problem
    from runner.profiling.together import ProfilesTogether

    config, given = checked_search(words)
    config.parallelism.ranks = ranks_to_share(config)
    here = this_machine(config)
    machine = Machine(None, None, here.device_memory_bytes, here.cores, here.memory_bytes)
    expected = expected_profiles(config, given, divides=divides)
    parts = [str(each) for each in dict.fromkeys(each.parallelism.tensor for each in expected) if each > 1]
    progress(f"profiling the model{', whole and divided by ' + ', '.join(parts) if parts else ''} ...")
    profile_of = ProfilesTogether(expected)
    problem, sizes = planning_problem(config, profile_of, machine, given, divides=divides)
    return config, problem, LayoutJudge(words, config, sizes, machine)


def checked_search(words: Sequence[str]) -> tuple[RunConfig, set[str]]:
    """The request of a command line with ``parallelism=auto``, and the keys that stay, by all rules without a model.

    Raises:
        RequestError: the request has problems.
    """
    from runner.plan.planners.problem import alone

    config, layers = resolve_with_layers(words)
    config = with_measured_link(config)
    typed = keys_given(words, layers)
    given = _given(typed, config.parallelism.free)
    raise_problems(
        [
            *_problems(config),
            *_order_problems(config, given),
            *_search_problems(config, typed),
            *rules(without_search(alone(config))),
            *_launcher_problems(config),
        ]
    )
    return config, given


def _of_published(
    section: PlannerConfig, problem: PlanningProblem, judge: LayoutJudge, progress: Callable[[str], None]
) -> FoundLayout:
    """The layout that a published planner finds.

    Raises:
        RequestError: it finds none that fits by its own model, or one that the engine does not run.
    """
    from runner.plan.planners.choose import Choice, Chosen
    from runner.plan.planners.published.registry import answer_of, form_that_runs, planner_of

    name, answer = section.name, answer_of(planner_of(section), problem)
    if answer is None:
        why = "By its own cost model no layout that it knows fits the memory"
        raise RequestError([Problem("planner", name, "must find a layout", why, "planner=joint")])
    if answer.needs:
        form = form_that_runs(section, problem)
        fix = "planner=joint" if form is None else f"planner.form={form}"
        raise RequestError([Problem("planner", name, "must find a layout that can run", answer.needs[0], fix)])
    keys = judge.keys(answer)
    best, evaluated = Choice(answer, keys, judge.typed(keys)), 1
    is_measured = best.plan.profile.seconds_source == "measured"  # estimates are of FLOPs, which stay
    is_open = judge.leaves_open("kernels") and judge.leaves_open(_SUBSTITUTIONS)
    if name == "unity" and is_measured and is_open and answer.tensor == 1:
        progress("substitutions inside layers ...")
        best, evaluated = _with_substitutions(best, judge)
    chosen = Chosen(best, searched=1, evaluated=evaluated)
    return FoundLayout(tuple(judge.words(keys)), chosen, problem, judge)


def _with_substitutions(choice: Choice, judge: LayoutJudge) -> tuple[Choice, int]:
    """The choice with the substitutions inside layers whose plan is fastest, and how many plans were made.

    It stays without any where none is faster by more than plans tell apart, or than repeats of its layers differ.
    """
    from runner.plan.planners.choose import NOT_TOLD_APART
    from runner.plan.planners.published.unity import best_substitutions

    plain = {**choice.keys}
    made: dict[tuple[str, ...], Choice] = {(): choice}

    def seconds(names: tuple[str, ...]) -> float:
        if names not in made:
            try:
                keys = {**plain, _SUBSTITUTIONS: [*names]}
                made[names] = replace(choice, keys=keys, plan=judge.typed(keys))
            except RequestError:
                return math.inf
        return made[names].seconds if made[names].plan.fits or not choice.plan.fits else math.inf

    try:
        possible = judge.typed({**plain, "kernels": "substituted"}).profile.substituted
    except RequestError:
        return choice, 1
    names = [each.partition(" ")[0] for each in possible]
    best = made[best_substitutions(names, seconds)]
    unsure = max(NOT_TOLD_APART, choice.plan.profile.spread, best.plan.profile.spread)
    return best if best.seconds < (1 - unsure) * choice.seconds else choice, len(made) + 1


@dataclass(frozen=True)
class Compared:
    """What one planner makes of a problem.

    Args:
        planner: its name.
        search_seconds: seconds of processor time that it took.
        evaluated: the layouts with their cuts that it compared; None: it does not count them.
        own_prediction: seconds of a step by its own cost model; None: it found nothing.
        plan: the whole plan of its answer; None: there is none.
        why_not: why its answer cannot run; empty if it can.
        overrides: the words that ask for its answer.
    """

    planner: str
    search_seconds: float
    evaluated: int | None
    own_prediction: float | None
    plan: RunPlan | None
    why_not: str
    overrides: tuple[str, ...] = ()


def compare_planners(words: Sequence[str], progress: Callable[[str], None] = lambda line: None) -> list[Compared]:
    """What every planner makes of one request, each judged by a whole plan.

    Args:
        words: the command line, with ``parallelism=auto``.
        progress: is told what is done.

    Raises:
        RequestError: the request has problems.
    """
    from runner.plan.planners.published.registry import PUBLISHED, answer_of

    if any(word.lstrip("+").startswith("parallelism.free=") for word in words):
        why = "A published planner chooses what its paper chooses"
        raise RequestError([Problem("parallelism.free", "set", "must not be set with --planners", why, "--why")])
    begun = time.process_time()
    found = find_layout(words, progress, every_degree=True)
    best = found.chosen.best
    taken = time.process_time() - begun
    plan = best.plan
    made = [
        Compared("joint", taken, found.chosen.evaluated, best.answer.seconds, plan, "", found.judge.spelled(best.keys))
    ]
    for name, planner in PUBLISHED.items():
        progress(f"planner {name} ...")
        begun = time.process_time()
        answer = answer_of(planner, found.problem)
        taken = time.process_time() - begun
        if answer is None:
            made.append(Compared(name, taken, None, None, None, "by its own model nothing fits"))
            continue
        keys = found.judge.keys(answer)
        own = name, taken, None, answer.seconds
        if answer.needs:
            made.append(Compared(*own, None, answer.needs[0]))
            continue
        try:
            made.append(Compared(*own, found.judge.typed(keys), "", found.judge.spelled(keys)))
        except RequestError as error:
            made.append(Compared(*own, None, error.problems[0].line(), found.judge.spelled(keys)))
    return made


def _given(keys: Mapping[str, bool], free: Sequence[str] | None) -> set[str]:
    """What the user has fixed: what is set, and what ``parallelism.free`` does not name.

    Degrees of a file give way to ``parallelism=auto`` on the command line, and what ``parallelism.free`` names, too.
    """
    if not {*(free or ())} <= {*FREE_NAMES}:  # which is refused
        free = None
    gives_way = {*_DEGREES, *(freed_keys(free) if free is not None else ())}
    return {key for key, typed in keys.items() if typed or key not in gives_way} | {*held_keys(free)}


def _order_problems(config: RunConfig, given: Collection[str]) -> list[Problem]:
    """A problem of a schedule that the user has named and that the search cannot play."""
    from runner.schedule.catalogue.registry import ALIASES, SPECS

    name = config.schedule.name
    for key, why in _OF_UNEQUALS.items():
        numbers = getattr(config.schedule, key)
        if numbers is not None:
            path, shown = f"schedule.{key}", f"[{','.join(f'{each:g}' for each in numbers)}]"
            return [Problem(path, shown, "must be null with parallelism=auto", why, f"{path}=null")]
    if "schedule" not in given or name == "auto":
        return []
    spec = SPECS.get(ALIASES.get(name, name))
    if spec is not None and spec.kind == "synchronous" and not spec.by_costs and spec.default_chunks is not None:
        return []
    rule = "must be a flushed order of its own with parallelism=auto"
    why = "The search plays published orders that wait for the step before, with all layouts"
    return [Problem("schedule", name, rule, why, "schedule=1f1b")]


def _search_problems(config: RunConfig, typed: Mapping[str, bool]) -> list[Problem]:
    """What rules say of the keys of the search itself; and what is both fixed and free."""
    own = (
        *("parallelism.ranks", "parallelism.free", "parallelism.search", "parallelism.devices"),
        *("hardware.devices", "planner"),
    )
    found = [each for each in rules(config) if each.path.startswith(own)]
    if found or config.parallelism.free is None:
        return found
    groups = (key.partition(".")[0] for key, is_typed in typed.items() if is_typed)  # zero=1 sets zero.stage
    named = {key for key, is_typed in typed.items() if is_typed} | {
        f"{each}.stage" for each in groups if each == "zero"
    }
    both = sorted(freed_keys(config.parallelism.free) & named)
    why = "The command line sets it, and what is named there is kept"
    return [Problem("parallelism.free", key, "must not be set beside it", why, f"without {key}") for key in both]


def _launcher_problems(config: RunConfig) -> list[Problem]:
    """What rules say of how so many ranks are started, which one alone is not."""
    from runner.plan.planners.problem import alone

    made = without_search(alone(config))
    made.launcher, made.parallelism.data = config.launcher, ranks_to_share(config)
    return [each for each in rules(made) if each.path.startswith("launcher.")]


def remedies(found: FoundLayout) -> list[tuple[str, int]]:
    """Changes of a request that does not fit with which something fits, each tried, with the peak of its fullest rank.

    Args:
        found: what was found; it does not fit.
    """
    judge, best = found.judge, found.chosen.best
    tried: list[tuple[str, Mapping[str, Any]]] = []
    degrees = best.answer
    states = {"zero.stage": 3, "parallelism.pipeline": 1, "parallelism.data": degrees.pipeline * degrees.data}
    for count in (2, 4, 8):
        tried += [
            (f"parallelism.ranks={found.problem.ranks * count}", more) for more in _with_ranks(best, judge, count)
        ]
    tried.append(("zero.stage=3", {**_without_pipeline(best.keys), **states}))
    tried.append(("offload.optimizer=cpu", {**best.keys, "zero.stage": degrees.zero or 1, "offload.optimizer": "cpu"}))
    tried.append(("precision=bf16_master", {**best.keys, "precision": "bf16_master"}))
    helps, kinds = list[tuple[str, int]](), set[str]()
    for words, keys in tried:
        kind = words.partition("=")[0]
        if kind in kinds:
            continue
        try:
            plan = judge.plan(keys)
        except RequestError:
            continue
        if plan.fits:
            kinds.add(kind)
            helps.append((words, max(plan.peak_memory_bytes)))
    return helps


def _with_ranks(best: Choice, judge: LayoutJudge, count: int) -> Iterator[dict[str, Any]]:
    """The layout on so many times its ranks: more replicas of as large micro-batches, or more stages.

    More parts of layers are not tried, for which the model would have to be profiled again.
    """
    keys, of = best.keys, best.answer
    smaller = {"schedule.microbatches": max(1, of.microbatches // count), "zero.stage": of.zero or 1}
    more = {
        "parallelism.data": {**keys, **smaller, "parallelism.data": of.data * count},
        "parallelism.pipeline": {
            **_without_pipeline(keys),
            "parallelism.pipeline": of.pipeline * count,
            "schedule": "1f1b",
        },
    }
    yield from (words for key, words in more.items() if judge.leaves_open(key))


def _without_pipeline(keys: Mapping[str, Any]) -> dict[str, Any]:
    of_stages = ("schedule", "schedule.chunks", "partition", "partition.boundaries")
    return {key: value for key, value in keys.items() if key not in of_stages}


def _problems(config: RunConfig) -> list[Problem]:
    if "WORLD_SIZE" in os.environ or num_ranks():
        why = "Each rank would search by what it measures itself, and may find another layout than its peers"
        fix = "`runner plan parallelism=auto` prints the request"
        return [Problem("parallelism", "auto", "must be chosen before the ranks are started", why, fix)]
    if config.launcher.name == "slurm" and config.hardware.name == "auto":
        why = "This machine is not the one whose layers would have to be measured"
        return [Problem("hardware", "auto", "must name the machine with launcher=slurm", why, "hardware=a100_80gb")]
    return []


def ranks_to_share(config: RunConfig) -> int:
    """The ranks to share out: as asked, else the devices of the planned nodes, of this batch job or machine."""
    if config.parallelism.ranks is not None:
        return config.parallelism.ranks
    if config.hardware.devices:
        return sum(each.count for each in config.hardware.devices)
    if config.hardware.devices_per_node is not None and config.hardware.name != "auto":
        return config.hardware.devices_per_node * (config.launcher.nodes or 1)
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        return int(tasks)
    from runner.model.device import device_type
    from runner.plan.cores import num_cores

    if device_type(config) == "cuda":
        import torch

        return max(1, torch.cuda.device_count())
    return max(1, num_cores() // config.trainer.threads)
