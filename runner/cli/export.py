"""``runner export``: writes the weights of a run into one file."""

from __future__ import annotations

from pathlib import Path

from runner.cli.arguments import Arguments
from runner.errors import EXIT_OK, Problem, did_you_mean, raise_problems

__all__ = ["run"]


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
    raise_problems(problems)
    from runner.training.export import export

    source, file = Path(arguments.words[0]), Path(arguments.words[1])
    source = _job(source, arguments.value("best"), file)
    named = arguments.value("allow-pickle")
    done = export(source, file, allow_pickle=named.split(",") if named else ())
    step = f" after step {done.step}" if done.step is not None else ""
    print(f"{file}: {done.tensors} tensors, {done.num_bytes / 1e6:.1f} MB, from {done.source}{step}")
    return EXIT_OK


def _job(directory: Path, figure: str | None, file: Path) -> Path:
    """The directory of the sweep's best job by ``figure``; without a figure the directory itself.

    Raises:
        RequestError: the directory is a sweep's and no figure is given, or the other way round; or no job has it.
    """
    from runner.report.best import FIGURES, best_of, figure_of
    from runner.report.ledger import LEDGER_FILE
    from runner.report.read import read_report

    is_sweep = (directory / LEDGER_FILE).is_file()
    if figure is None and not is_sweep:
        return directory
    if figure not in FIGURES and figure is not None:
        rule = f"must be {' or '.join(FIGURES)}"
        raise_problems([Problem("--best", figure, rule, fix=f"--best {did_you_mean(figure, FIGURES) or 'val_loss'}")])
    if not is_sweep:
        why = f"{directory} is no sweep's directory: it has no {LEDGER_FILE}"
        raise_problems([Problem("--best", figure, "belongs to a sweep", why, f"runner export {directory} {file}")])
    runs = read_report(directory).runs
    if figure is None:
        fix = f"runner export {directory} {file} --best {figure_of(runs) or 'loss'}"
        rule = "must be a run's directory or have --best"
        raise_problems([Problem("RUN_DIR", directory, rule, f"It is a sweep of {len(runs)} jobs", fix)])
    job = best_of(runs, str(figure))
    if job is None:
        why, other = f"No job of the sweep is complete and has {figure}", figure_of(runs)
        fix = f"--best {other}" if other else ""
        raise_problems([Problem("--best", figure, "must be a figure that jobs have", why, fix)])
    assert job is not None
    print(
        f"job {job.name}, {figure} {FIGURES[str(figure)](job):.6g}: {' '.join(job.record.extras.get('overrides', []))}"
    )
    return job.directory
