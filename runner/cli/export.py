"""``runner export``: writes the weights of a run into one file, or into a folder of another library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from runner.cli.arguments import Arguments
from runner.config.formats import DTYPES, FORMATS, MAX_SHARD_SIZE
from runner.config.units import format_bytes, parse_bytes
from runner.errors import EXIT_OK, Problem, did_you_mean, raise_problems
from runner.report.best import LOSSES, MODES, best_of, figure_of, figures_of, name_and_mode, value_of
from runner.report.ledger import LEDGER_FILE
from runner.report.read import Report, Run, read_report

__all__ = ["run"]

_ENDING = ".safetensors"


def run(arguments: Arguments) -> int:
    """Write the file.

    Raises:
        RequestError: there are no weights, or the file cannot be placed there.
        RunFailedError: the file could not be written, or differs when it is read back.
    """
    problems = list(arguments.problems)
    if len(arguments.words) != 2:
        asked = " ".join(arguments.words) or None
        rule = "must be a run's directory and the file to write"
        problems.append(Problem("RUN_DIR FILE", asked, rule, fix="runner export outputs/NAME/TIME model.safetensors"))
    form, dtype, size = (arguments.value(flag) for flag in ("format", "dtype", "max-shard-size"))
    problems += _format_problems(form, dtype, size)
    if len(arguments.words) == 2:
        problems += _ending_problems(Path(arguments.words[1]), form)
    raise_problems(problems)
    import torch

    from runner.training.export import export

    source, file = Path(arguments.words[0]), Path(arguments.words[1])
    source = _job(source, arguments.value("best"), file)
    named = arguments.value("allow-pickle")
    done = export(
        source,
        file,
        allow_pickle=named.split(",") if named else (),
        form=form or FORMATS[0],
        dtype=getattr(torch, DTYPES[dtype]) if dtype is not None else None,
        max_shard_size=size or MAX_SHARD_SIZE,
    )
    step = f" after step {done.step}" if done.step is not None else ""
    print(f"{file}: {done.tensors} tensors, {format_bytes(done.num_bytes)}, from {done.source}{step}")
    return EXIT_OK


def _format_problems(form: str | None, dtype: str | None, size: str | None) -> Iterator[Problem]:
    if form is not None and form not in FORMATS:
        yield Problem("--format", form, f"must be one of {', '.join(FORMATS)}", fix=_near(form, "format", FORMATS))
    if dtype is not None and dtype not in DTYPES:
        yield Problem("--dtype", dtype, f"must be one of {', '.join(DTYPES)}", fix=_near(dtype, "dtype", DTYPES))
    if size is not None:
        if form != "huggingface":
            yield Problem("--max-shard-size", size, "belongs to --format huggingface", "Others are not cut by size")
        try:
            parse_bytes(size)
        except ValueError as error:
            yield Problem("--max-shard-size", size, "must be a size", str(error), "--max-shard-size 5GB")


def _ending_problems(file: Path, form: str | None) -> Iterator[Problem]:
    if form in (None, FORMATS[0]) and file.suffix != _ENDING:
        why = "The file is of that format, which `torch.load` does not read"
        yield Problem("FILE", file, f"must end in {_ENDING}", why, f"{file.stem or 'model'}{_ENDING}")


def _near(given: str, flag: str, known: Iterable[str]) -> str:
    near = did_you_mean(given, known)
    return f"--{flag} {near}" if near is not None else ""


def _job(directory: Path, figure: str | None, file: Path) -> Path:
    """The directory of the sweep's best job by ``figure``; the directory itself where it is a run's.

    Raises:
        RequestError: there is no such job, or the directory and the figure do not go together.
    """
    sweep = read_report(directory) if (directory / LEDGER_FILE).is_file() else None
    raise_problems(_problems(directory, figure, file, sweep))
    job = best_of(sweep.runs, figure) if sweep is not None and figure is not None else None
    if job is None:
        return directory
    overrides = " ".join(job.record.extras.get("overrides", []))
    name, _ = name_and_mode(str(figure))
    print(f"job {job.name}, {name} {value_of(job, name):.6g}: {overrides}")
    return job.directory


def _problems(directory: Path, figure: str | None, file: Path, sweep: Report | None) -> Iterator[Problem]:
    """Why there are no weights to take: ``--best`` is missing or belongs to no sweep, or no job has the figure."""
    usual = figure_of(sweep.runs) if sweep is not None else None
    if figure is None and sweep is not None:
        fix = f"runner export {directory} {file} --best {usual or 'loss'}"
        why = f"It is a sweep of {len(sweep.runs)} jobs"
        yield Problem("RUN_DIR", directory, "must be a run's directory or have --best", why, fix)
    elif figure is not None and sweep is None:
        why = f"{directory} is no sweep's directory: it has no {LEDGER_FILE}"
        yield Problem("--best", figure, "belongs to a sweep", why, f"runner export {directory} {file}")
    elif figure is not None and sweep is not None:
        yield from _figure_problems(figure, sweep.runs)


def _figure_problems(figure: str, runs: Sequence[Run]) -> Iterator[Problem]:
    """Why no job of a sweep is the best by ``figure``, which may be ``val_NAME:max``."""
    (name, mode), known = name_and_mode(figure), figures_of(runs)
    if name not in known:
        near = f"val_{name}" if f"val_{name}" in known else did_you_mean(name, known)
        order = f":{mode}" if mode in MODES else ""
        fix = f"--best {near}{order}" if near in LOSSES or (near is not None and order) else ""
        yield Problem("--best", figure, f"must be one of {', '.join(known)}", fix=fix)
    elif mode not in (None, *MODES):
        yield Problem("--best", figure, "what stands after the colon must be min or max")
    elif mode is None and name not in LOSSES:
        why = (
            f"The runner does not know if more of it is better: --best {name}:max is the highest, {name}:min the lowest"
        )
        yield Problem("--best", figure, "must say which value is the best", why)
    elif best_of(runs, figure) is None:
        usual = figure_of(runs)
        why, fix = f"No job of the sweep is complete and has {name}", f"--best {usual}" if usual else ""
        yield Problem("--best", figure, "must be a figure that jobs have", why, fix)
