"""``runner verify``: compares a layout with one process."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from runner.cli import screen
from runner.cli.arguments import Arguments
from runner.cli.request import checked
from runner.errors import EXIT_DIFFERENT, EXIT_OK, Problem

if TYPE_CHECKING:
    from runner.training.verify.compare import Comparison

__all__ = ["run"]


def run(arguments: Arguments) -> int:
    """Print the comparison.

    Returns:
        0 if the layout equals one process, 4 if it does not.

    Raises:
        RequestError, DoesNotFitError: the request could not be trained either.
        RunFailedError: a rank failed.
    """
    steps, problems = _steps(arguments.value("steps"))
    unread: list[str] = []
    config = checked(arguments.words, [*arguments.problems, *problems], command="verify", unread=unread)
    screen.tell(unread)
    screen.begins(screen.PLANNING)
    from runner.launch.verify import verify

    found = verify(config, steps=steps)
    if isinstance(found, int):
        return found
    print(json.dumps(found.to_json(), indent=2) if arguments.switch("json") else _told(found, config.precision.name))
    return EXIT_OK if found.equal else EXIT_DIFFERENT


def _steps(text: str | None) -> tuple[int, list[Problem]]:
    from runner.launch.verify import DEFAULT_STEPS

    if text is None:
        return DEFAULT_STEPS, []
    if text.isdecimal() and int(text) >= 1:
        return int(text), []
    return DEFAULT_STEPS, [Problem("--steps", text, "must be a whole number, 1 or above", fix="--steps 4")]


def _told(found: Comparison, precision: str) -> str:
    of_parts = found.of_parts
    whole = _told_of_whole(replace(found, equal=found.first_difference is None), precision)
    if of_parts is None:
        return whole
    if not of_parts.equal:
        return f"{whole}\nbeside the same parts in one process: {_different(of_parts)}"
    return f"{whole}\nequal bit for bit over {of_parts.steps} steps to the same parts in one process"


def _told_of_whole(found: Comparison, precision: str) -> str:
    if found.equal:
        how = "bit for bit" if found.bitwise else "up to the order of sums"
        return f"equal {how} over {found.steps} steps" + ("" if found.bitwise else f"; {_largest(found)}")
    told, first = _different(found), found.first_difference
    is_first = first is not None and first.step == 1 and first.quantity != "weight"
    if found.promise == "bitwise" or precision == "fp64" or is_first:
        return told
    return (
        f"{told}\nWhat came before is equal up to the order of sums. An optimizer that rounds to fewer bits, as Muon"
        " does, and weights whose gradients are rounding alone may let that grow so far; precision=fp64 tells it from a"
        " mistake."
    )


def _different(found: Comparison) -> str:
    first = found.first_difference
    assert first is not None
    what = f"the {first.quantity} of {first.parameter}" if first.parameter is not None else "the loss"
    return f"different from step {first.step} on, first {what}; {_largest(found)}"


def _largest(found: Comparison) -> str:
    return f"largest differences: loss {found.loss:.3g}, gradients {found.gradients:.3g}, weights {found.weights:.3g}"
