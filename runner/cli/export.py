"""``runner export``: writes the weights of a run into one file."""

from __future__ import annotations

from pathlib import Path

from runner.cli.arguments import Arguments
from runner.errors import EXIT_OK, Problem, raise_problems

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

    file = Path(arguments.words[1])
    named = arguments.value("allow-pickle")
    done = export(Path(arguments.words[0]), file, allow_pickle=named.split(",") if named else ())
    step = f" after step {done.step}" if done.step is not None else ""
    print(f"{file}: {done.tensors} tensors, {done.num_bytes / 1e6:.1f} MB, from {done.source}{step}")
    return EXIT_OK
