"""``runner evaluate`` and ``runner predict``: loss and metrics, or outputs, of a run's weights in any layout."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.arguments import Arguments
from runner.errors import EXIT_OK, Problem, did_you_mean, raise_problems

if TYPE_CHECKING:
    from runner.launch.evaluate import Evaluation, Found
    from runner.launch.local.ranks import Outcome

__all__ = ["asked_for", "print_outcome", "run"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """The words and flags of either command.

    Args:
        run_dir: the run's directory.
        weights: what of it.
        overrides: the words with ``=``.
        files: the words after the run's directory without one.
        sets: the sets of ``--set``.
    """

    run_dir: Path
    weights: Found
    overrides: tuple[str, ...]
    files: tuple[Path, ...]
    sets: tuple[str, ...]


def run(arguments: Arguments) -> int:
    """Measure, print and write.

    Returns:
        0, or the status with which a rank failed.

    Raises:
        RequestError: there are no weights, or the request has problems.
    """
    asked = asked_for(arguments, num_files=0, most_sets=3, usage="runner evaluate outputs/NAME/TIME")
    from runner.launch.evaluate import evaluate

    out = arguments.value("out")
    file = Path(out) if out is not None else None
    found = evaluate(asked.run_dir, asked.overrides, asked.weights, sets=asked.sets, file=file)
    return print_outcome(found, as_json=arguments.switch("json"), told=_told)


def asked_for(arguments: Arguments, *, num_files: int, most_sets: int, usage: str) -> Asked:
    """The checked words and flags.

    Args:
        num_files: how many words follow the run's directory.
        most_sets: how many sets may be named.
        usage: a right command, for messages.

    Raises:
        RequestError: a word or flag is wrong, or there are no weights.
    """
    from runner.launch.evaluate import BEST, LAST, find_weights
    from runner.training.evaluation_request import SETS

    overrides = tuple(word for word in arguments.words if _is_override(word))
    words = [word for word in arguments.words if word not in overrides]
    problems = list(arguments.problems)
    if len(words) != 1 + num_files:
        rule = f"must be a run's directory{' and the file to write' if num_files else ''}, and overrides KEY=VALUE"
        problems.append(Problem("RUN_DIR", " ".join(words) or None, rule, fix=usage))
    chosen = [name for name in (BEST, LAST, "weights") if name in arguments.flags]
    if len(chosen) > 1:
        why = f"Also --{chosen[0]} was given"
        problems.append(Problem("flag", f"--{chosen[1]}", "must stand alone", why, f"--{chosen[0]}"))
    named = arguments.value("set")
    sets = tuple(named.split(",")) if named else ()
    if [each for each in sets if each not in SETS] or len(sets) > most_sets:
        rule = f"must be {'one or several' if most_sets > 1 else 'one'} of {', '.join(SETS)}"
        meant = [each if each in SETS else did_you_mean(each, SETS) or SETS[0] for each in sets]
        problems.append(Problem("--set", named, rule, fix=f"--set {','.join(meant[:most_sets])}"))
    raise_problems(problems)
    file = arguments.value("weights")
    which = chosen[0] if chosen and chosen[0] != "weights" else None
    weights = find_weights(Path(words[0]), which, Path(file) if file is not None else None)
    return Asked(Path(words[0]), weights, overrides, tuple(map(Path, words[1:])), sets)


def _is_override(word: str) -> bool:
    """Whether a word is KEY=VALUE, and no path such as ``outputs/lr=0.1``."""
    key, sign, _ = word.partition("=")
    return bool(sign) and "/" not in key and not Path(word).is_dir()


def print_outcome(found: Evaluation | Outcome, *, as_json: bool, told: Callable[[Evaluation], str]) -> int:
    """Print what was found, or what ranks that failed have said, and return the exit status."""
    from runner.launch.local.ranks import Outcome

    if isinstance(found, Outcome):
        for message in found.messages:
            logger.error("%s", message)
        return found.exit_status
    print(json.dumps(found.to_json(), indent=2) if as_json else told(found))
    return EXIT_OK


def _told(found: Evaluation) -> str:
    width = max(map(len, (*found.figures, "weights")))
    rows = [f"{name:{width}}  {value:.6g}" for name, value in found.figures.items()]
    weights = f"{'weights':{width}}  {found.weights.path} ({found.weights.which})"
    return "\n".join([weights, *rows, f"{'written':{width}}  {found.file}"])
