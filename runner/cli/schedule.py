"""``runner schedule``: draw the order of a pipeline's work. No model, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.cli.arguments import Arguments
from runner.cli.request import checked
from runner.config.schema import CostConfig
from runner.errors import EXIT_OK, Problem, RequestError, raise_problems
from runner.schedule.registry import ALIASES, SPECS, build
from runner.schedule.simulate import Costs
from runner.schedule.values import Schedule

__all__ = ["run"]

_FILES = ("csv", "svg", "trace")


def run(arguments: Arguments) -> int:
    """Print the schedule as a text grid or, with ``--json``, as the contract's document; write the files asked for."""
    if arguments.switch("list"):
        raise_problems(arguments.problems)
        print(_list())
        return EXIT_OK
    config = checked(arguments.words, [*arguments.problems, *_unwritable(arguments)])
    schedule = build(
        config.schedule.name,
        ranks=config.parallelism.pipeline,
        microbatches=config.schedule.microbatches,
        chunks=config.schedule.chunks,
        file=config.schedule.file,
    )
    costs = _costs(config.cost)
    for flag in _FILES:
        file = arguments.value(flag)
        if file is not None:
            _write(flag, Path(file), _content(flag, schedule, costs))
    print(_shown(schedule, costs, as_json=arguments.switch("json")))
    return EXIT_OK


def _costs(config: CostConfig) -> Costs:
    return Costs(F=config.F, B=config.B, I=config.I, W=config.W, comm=config.comm)


def _unwritable(arguments: Arguments) -> list[Problem]:
    files = [(flag, Path(file)) for flag in _FILES if (file := arguments.value(flag)) is not None]
    return [
        Problem(f"--{flag}", file, "must be a file in a folder that exists", fix=f"--{flag} {file.name}")
        for flag, file in files
        if file.is_dir() or not file.absolute().parent.is_dir()
    ]


def _write(flag: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError([Problem(f"--{flag}", file, "cannot be written", str(error))]) from error


def _content(flag: str, schedule: Schedule, costs: Costs) -> str:
    """What the file of ``--csv``, ``--svg`` or ``--trace`` holds."""
    from runner.schedule.render import to_csv, to_svg, to_trace

    if flag == "csv":
        return to_csv(schedule)
    if flag == "svg":
        return to_svg(schedule, costs)
    return json.dumps(to_trace(schedule, costs)) + "\n"


def _shown(schedule: Schedule, costs: Costs, *, as_json: bool) -> str:
    from runner.schedule.render import to_json, to_text

    return _document(to_json(schedule, costs)) if as_json else to_text(schedule, costs)


def _document(content: dict[str, Any]) -> str:
    """JSON with one line per key: whole it is unreadable, and indented a thousand lines long."""
    return "{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()) + "}"


def _list() -> str:
    """Every schedule with its formulas: for D equal stages, T micro-batches, rank r."""
    entries = []
    for name, spec in SPECS.items():
        aliases = [alias for alias, meant in ALIASES.items() if meant == name]
        lines = [f"{', '.join([name, *aliases])}: {spec.description} ({spec.kind})", f"    source: {spec.source}"]
        if spec.formulas is not None:
            lines.append(f"    bubble_ratio = {spec.formulas.bubble_ratio}    makespan = {spec.formulas.span}")
            lines.append(f"    peak_activations = {spec.formulas.peak_activations}")
        entries.append("\n".join(lines))
    legend = "For D ranks with equal stages, T micro-batches, rank r, and F and B a stage's forward and backward."
    return "\n\n".join([*entries, legend])
