"""``runner plan``: checks a request, cuts the model into stages and predicts, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli import screen
from runner.cli.arguments import Arguments
from runner.cli.auto import compare, found_layout, plan_layout, words_with_batch
from runner.cli.files import unwritable, write
from runner.cli.request import checked, jobs_of
from runner.config.compose.length_notes import length_notes
from runner.errors import EXIT_DOES_NOT_FIT, EXIT_OK, Problem, RequestError, raise_problems
from runner.launch.needs.packages import missing_for_plan
from runner.launch.run.directory import run_directory_problems, taken_directory
from runner.launch.run.find_layout import asks_for_layout
from runner.launch.run.largest_batch import asks_for_batch
from runner.launch.run.prepare import callable_problems
from runner.launch.run.resume import AUTO, with_checkpoint
from runner.plan.requested_schedule import resolve_request
from runner.progress import doing, now

if TYPE_CHECKING:
    from runner.cli.why import Why
    from runner.config.schema import RunConfig
    from runner.launch.run.projection import MeasuredRun
    from runner.plan.values import RunPlan

__all__ = ["run"]

_NOT_REHEARSED = Problem(
    *("flag", "--rehearse", "takes plans whose layout is known"),
    *("The search makes many; it judges them by what it derives", "the request it prints"),
)


def run(arguments: Arguments) -> int:
    """Print the plan, or with ``-m`` a table of the jobs' plans, or with ``--rules`` every rule and no plan.

    Returns:
        3 if a rank needs more than its memory; 0 for a sweep of plans, whatever they say.

    Raises:
        RequestError: the request has problems, and the JSON document does not contain them.
    """
    as_json, why = arguments.switch("json"), arguments.switch("why")
    if arguments.switch("rules"):
        return _print_rules(arguments, as_json=as_json)
    measured, arguments = _measured(arguments)
    raise_problems(_picture_problems(arguments))
    if arguments.switch("multirun"):
        return _run_sweep(jobs_of(arguments), as_json=as_json, why=why, rehearse=arguments.switch("rehearse"))
    if (planners := arguments.value("planners")) is not None:
        if planners != "all":
            raise_problems(
                [Problem("--planners", planners, "must be all", "One is asked by planner=NAME", "--planners all")]
            )
        raise_problems(arguments.problems)
        return compare(arguments.words, as_json=as_json)
    more: dict[str, Any] = {}
    if asks_for_batch(arguments.words):
        raise_problems(arguments.problems)
        batch = words_with_batch(arguments.words)
        arguments = replace(arguments, words=batch.words)
        more = {"batch_size": batch.size, "batch": batch.to_json()}
        if not as_json:
            print(screen.wrapped(batch.line, screen.width(), "  "))
    if asks_for_layout(arguments.words):
        raise_problems(arguments.problems)
        return plan_layout(arguments.words, as_json=as_json, recipe=arguments.value("write"), why=why, more=more)
    try:
        plan = _shown_under_way(arguments)
    except RequestError as error:
        if as_json:
            print(json.dumps(_refused(error), indent=2))
        raise
    if (picture := arguments.value("svg")) is not None:
        _draw(plan, Path(picture))
    projected = measured.projection(plan, resolve_request(arguments.words)) if measured is not None else None
    if projected is not None:
        more["projected"] = projected.to_json()
    document = json.dumps(_document(plan, arguments.words, why) | more, indent=2) if as_json else None
    print(document if document is not None else _text(plan, arguments.words, why))
    if projected is not None and not as_json:
        print(screen.wrapped(projected.line, screen.width(), "  "))
    return EXIT_OK if plan.fits else EXIT_DOES_NOT_FIT


def _measured(arguments: Arguments) -> tuple[MeasuredRun | None, Arguments]:
    """The run that ``--from`` names, and its request with the words of this one."""
    if (origin := arguments.value("from")) is None:
        return None, arguments
    from runner.launch.run.projection import measured_run

    run = measured_run(Path(origin))
    arguments = replace(arguments, words=run.words(arguments.words))
    if arguments.switch("multirun") or asks_for_layout(arguments.words) or arguments.value("planners") is not None:
        why = "Searches and sweeps make many: take the request that they print"
        raise_problems([Problem("--from", origin, "takes one plan, whose layout is known", why)])
    return run, arguments


def _picture_problems(arguments: Arguments) -> list[Problem]:
    """Why ``--svg`` cannot draw, as far as it is known before there is a plan."""
    picture, recipe = arguments.value("svg"), arguments.value("write")
    if picture is not None and arguments.switch("multirun"):
        return [Problem("--svg", picture, "takes one plan", "The picture shows one stage of it")]
    if recipe is not None and arguments.switch("multirun"):
        return [Problem("--write", recipe, "takes one plan", "A recipe has one layout", "the request it prints")]
    auto = asks_for_layout(arguments.words)
    if (auto or arguments.value("planners") is not None) and arguments.switch("rehearse"):
        return [_NOT_REHEARSED]
    if picture is not None and auto:
        return [
            Problem(
                "--svg", picture, "takes a plan whose layout is known", "The search makes many", "the request it prints"
            )
        ]
    if recipe is not None and not auto:
        return [
            Problem("--write", recipe, "belongs to parallelism=auto", "Another request is what you type", "--cfg job")
        ]
    return unwritable(arguments, ("svg", "write"))


def _draw(plan: RunPlan, file: Path) -> None:
    """Draw what other budgets for activations would cost."""
    if not plan.activations.choices:
        why = "No policy of this plan chooses its programs under memory_limit"
        raise RequestError([Problem("--svg", file, "has nothing to draw", why, "activation_checkpoint=auto")])
    from runner.plan.draw_front import front_svg

    write("svg", file, front_svg(plan))


def _shown_under_way(arguments: Arguments) -> RunPlan:
    """The plan of one request; a terminal says meanwhile that it is being made."""
    with doing(screen.PLANNING):
        return _plan(arguments.words, arguments, rehearse=arguments.switch("rehearse"))


def _print_rules(arguments: Arguments, *, as_json: bool) -> int:
    """Every rule by group. They are the same for every request, so that none is taken."""
    alone = "prints all rules and takes no request: --why has those that look at one"
    others = [Problem("flag", "--rules", alone, fix="runner plan --rules")] if arguments.words else []
    raise_problems([*arguments.problems, *others])
    from runner.plan.rules.document import rules_to_json, rules_to_text

    print(json.dumps(rules_to_json(), indent=2) if as_json else screen.wrapped_lines(rules_to_text()))
    return EXIT_OK


def _document(plan: RunPlan, overrides: Sequence[str], why: bool) -> dict[str, Any]:
    return plan.to_json() | ({"why": _why(plan, overrides).to_json()} if why else {})


def _text(plan: RunPlan, overrides: Sequence[str], why: bool) -> str:
    from runner.plan.render import to_table

    columns = screen.width()
    lines = [screen.wrapped(line, columns, "    ") for line in _why(plan, overrides).lines()] if why else []
    return "\n".join([to_table(plan, width=columns).rstrip("\n"), *lines])


def _why(plan: RunPlan, overrides: Sequence[str]) -> Why:
    """The reasons for a plan."""
    from runner.cli.why import why_of

    return why_of(plan, resolve_request(overrides), overrides)


def _run_sweep(jobs: Sequence[Sequence[str]], *, as_json: bool, why: bool, rehearse: bool) -> int:
    """Print one table of all jobs, the fastest that fits on top; before it, with ``--why``, the plan of each job."""
    from runner.launch.run.take_layout import misfit
    from runner.plan.render_sweep import SweepRow, sweep_text

    raise_problems([_NOT_REHEARSED] if rehearse and any(map(asks_for_layout, jobs)) else _missing(jobs))
    documents: list[dict[str, Any]] = []
    rows: list[SweepRow] = []
    target = _plan_report(jobs)
    for number, overrides in enumerate(jobs):
        screen.under_way(f"plan {number + 1} of {len(jobs)}")
        words, lack = tuple[str, ...](), ""
        try:
            if asks_for_layout(overrides):
                found = found_layout(overrides)
                plan, lack = found.chosen.best.plan, misfit(found)
                words = _in_own_directory(found.words, number)
            else:
                plan = _plan(overrides, rehearse=rehearse)
        except RequestError as error:
            documents.append({"overrides": list(overrides), **_refused(error)})
            rows.append(SweepRow(overrides, problems=error.problems))
            continue
        request = {"request": list(words)} if words else {}
        problems = {"problems": [lack]} if lack else {}
        document = _document(plan, words or overrides, why) | problems
        documents.append({"overrides": list(overrides), **request, **document})
        rows.append(SweepRow(overrides, plan, found=words, lack=lack))
        if why and not as_json:
            screen.under_way("")
            print(f"{' '.join(overrides)}\n{_text(plan, words or overrides, why)}\n")
    screen.under_way("")
    if as_json:
        print(json.dumps(documents, indent=2))
        return EXIT_OK
    print(sweep_text(rows, screen.width()))
    if target is not None:
        print(_reported(target, documents))
    return EXIT_OK


def _in_own_directory(words: Sequence[str], number: int) -> tuple[str, ...]:
    """The words of a job of a sweep, which has a directory of its own where the sweep was given one, as its runs do."""
    return tuple(f"{word}/{number}" if word.startswith("run_dir=") else word for word in words)


def _missing(jobs: Sequence[Sequence[str]]) -> Iterable[Problem]:
    """One problem for every package that jobs need and that is not installed."""
    found: dict[str, Problem] = {}
    for overrides in jobs:
        with suppress(RequestError):
            found = missing_for_plan(resolve_request(overrides)) | found
    return found.values()


def _plan_report(jobs: Sequence[Sequence[str]]) -> str | None:
    """The function that receives the plans of a sweep (``plan_report``): the first that a job names."""
    from runner.config.compose.resolve import resolve

    for overrides in jobs:
        with suppress(RequestError):
            return resolve(overrides).plan_report
    return None


def _reported(target: str, documents: Sequence[Mapping[str, Any]]) -> str:
    """The table that this function makes of the plans, as text."""
    from runner.report.tables import TextTable
    from runner.targets import import_target

    made = import_target("plan_report", target)(documents)
    rows = tuple(tuple(row) for row in made["rows"])
    return TextTable(made["title"], tuple(made["header"]), rows, (), (), tuple(made["notes"])).markdown()


def _plan(overrides: Sequence[str], arguments: Arguments | None = None, *, rehearse: bool = False) -> RunPlan:
    unread: list[str] = []
    command, earlier = ("plan", arguments.problems) if arguments is not None else ("plan -m", ())
    config = checked(overrides, earlier, command=command, unread=unread)
    raise_problems([*_place_problems(config), *callable_problems(config), *missing_for_plan(config).values()])
    if config.model.pretrained is not None:
        from runner.model.check_pretrained import planned_problems

        raise_problems(planned_problems(config))
    if config.resume is not None and (arguments is not None or config.resume != AUTO):  # jobs have own directories
        with_checkpoint(config)
    from runner.launch.run.measured_plan import measured_plan
    from runner.model.device import device_memory_bytes
    from runner.plan.cores import num_cores
    from runner.profiling.meet import meet
    from runner.profiling.single_samples import try_single_samples
    from runner.training.first_batches import first_batches
    from runner.training.try_parts import try_parts

    notes = [*unread, *_epoch_notes(config), *_place_notes(config), *length_notes(config)]
    device, alone = device_memory_bytes(config), arguments is not None
    first = first_batches(config)
    notes += first.notes(config.data.batch_size)
    made = measured_plan(config, device_memory_bytes=device, cores=num_cores(), suggest=alone)
    if rehearse or not made.fits:
        from runner.launch.run.rehearsed_plan import unless_counted_to_fit, with_rehearsal

        made = (with_rehearsal if rehearse else unless_counted_to_fit)(config, made)
    if alone and not made.fits:
        from runner.launch.run.fitting import with_layout_that_fits

        made = replace(made, problems=with_layout_that_fits(made.problems, overrides, now))
    meet(config, made.profile, first.training, first.validation)
    try_single_samples(config, first.training, first.samples)
    try_parts(config, made.profile, first.training)
    return replace(made, advice=(*notes, *made.advice)) if notes else made


def _place_problems(config: RunConfig) -> list[Problem]:
    """Why no run could be in the directory of the request; that it holds a run already is only noted."""
    return run_directory_problems(config.name, config.run_dir, continues=True)


def _place_notes(config: RunConfig) -> list[str]:
    """What ``runner train`` would say of a directory that already holds a run."""
    if config.run_dir is None or config.resume == AUTO:
        return []
    taken = taken_directory(Path(config.run_dir))
    return [f"runner train would refuse this: {taken.line()}"] if taken is not None else []


def _epoch_notes(config: RunConfig) -> list[str]:
    """How many steps the epochs of a request are, if it has any."""
    if config.trainer.max_epochs is None:
        return []
    from runner.model.epochs import count_epoch_samples, epochs_said, in_steps

    samples = count_epoch_samples(config)
    return [epochs_said(in_steps(config, samples), samples)]


def _refused(error: RequestError) -> dict[str, Any]:
    return {"fits": False, "problems": [problem.line() for problem in error.problems]}
