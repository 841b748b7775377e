"""``runner doctor``: reports what this machine can run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from runner.cli import screen
from runner.cli.arguments import Arguments
from runner.errors import EXIT_FAILED, EXIT_OK, Problem, did_you_mean, raise_problems
from runner.optim.operators import OPERATORS

__all__ = ["run"]

_INDENT = " " * 25  # the place of what was found


def run(arguments: Arguments) -> int:
    """Print the checks.

    Returns:
        1 if something that training needs is missing, else 0.

    Raises:
        RequestError: a flag or a word is not known.
    """
    why = "`runner doctor` takes no overrides"
    words = [Problem("word", word, "is not understood", why) for word in arguments.words]
    operators = tuple((arguments.value("build") or "").split(",")) if arguments.switch("build") else ()
    raise_problems([*arguments.problems, *words, *_unknown(operators)])
    from runner.launch.doctor.builds import builds
    from runner.launch.doctor.rows import collectives, examine
    from runner.launch.run.directory import OUTPUTS

    checks = examine(OUTPUTS) + builds(operators)
    if arguments.switch("collectives"):
        checks += collectives(*_ranks())
    good = all(check.ok for check in checks if check.needed)
    if arguments.switch("json"):
        print(json.dumps({"ok": good, "checks": [check.to_json() for check in checks]}, indent=2))
    else:
        for check in checks:
            line = f"{'ok' if check.ok else 'missing':<8} {check.name:<15} {check.found}"
            print(screen.wrapped(line, screen.width(), _INDENT))
            if check.fix:
                print(f"{_INDENT}{check.fix}")
        print("this machine can train" if good else "something that training needs, or that was asked for, is missing")
    return EXIT_OK if good else EXIT_FAILED


def _unknown(operators: Sequence[str]) -> Iterator[Problem]:
    for name in operators:
        if name not in OPERATORS:
            why = f"The operators are {', '.join(OPERATORS)}"
            near = did_you_mean(name, OPERATORS)
            yield Problem(
                "--build", name, "is no operator that the runner uses", why, f"--build {near}" if near else ""
            )


def _ranks() -> tuple[str, int]:
    """The device and the number of ranks for timing collectives: all GPUs if there are several, else two CPU ranks."""
    import torch

    gpus = torch.cuda.device_count()
    return ("cuda", gpus) if gpus > 1 else ("cpu", 2)
