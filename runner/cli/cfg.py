"""``--cfg job``: prints the resolved request of a command, and what set each key of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.cli.arguments import Arguments
from runner.cli.request import checked, jobs_of
from runner.config.compose.layers import sources
from runner.config.compose.resolve import resolve_with_layers, to_container
from runner.config.schema import RunConfig
from runner.errors import EXIT_OK, Problem, raise_problems

__all__ = ["run"]

_JOB = "job"
_COLUMN = 44  # in which the sources stand, where lines are not longer
_INDENT = "  "


def run(arguments: Arguments) -> int:
    """Print the request as YAML with a comment beside each key; with ``-m`` one document for each job.

    Nothing is written or started.

    Raises:
        RequestError: the request has problems.
    """
    asked = arguments.value("cfg")
    what = [] if asked == _JOB else [Problem("--cfg", asked, "must be job", "It prints the request", "--cfg job")]
    if not arguments.switch("multirun"):
        print("\n".join(_document(arguments.words, [*arguments.problems, *what])))
        return EXIT_OK
    raise_problems([*arguments.problems, *what])
    for overrides in jobs_of(arguments):
        print("\n".join(["---", f"# {' '.join(overrides)}", *_document(overrides)]))
    return EXIT_OK


def _document(overrides: Sequence[str], problems: Sequence[Problem] = ()) -> Iterator[str]:
    container = to_container(checked(overrides, problems))
    _, layers = resolve_with_layers(overrides)
    yield from _lines(container, sources(container, layers, to_container(RunConfig())))


def _lines(value: Mapping[str, Any], source_of: Mapping[str, str], path: str = "", indent: str = "") -> Iterator[str]:
    for key, inner in value.items():
        below = f"{path}.{key}" if path else str(key)
        if isinstance(inner, Mapping) and inner:
            yield f"{indent}{_yaml(key)}:"
            yield from _lines(inner, source_of, below, indent + _INDENT)
        else:
            yield f"{f'{indent}{_yaml(key)}: {_yaml(inner)}':{_COLUMN}}  # {' '.join(source_of[below].split())}"


def _yaml(value: object) -> str:
    """A value as YAML in one line."""
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, width=float("inf"), allow_unicode=True).strip()[1:-1]
