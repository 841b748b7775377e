"""Calls what a configuration names: ``package.module:function`` with keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from traceback import extract_tb
from typing import Any

from torch._guards import detect_fake_mode

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, RunnerError, did_you_mean, raise_problems
from runner.model.seeds import seeded
from runner.reads import hearing, is_users_file
from runner.targets import import_target, with_environment

__all__ = [
    "call_function",
    "call_target",
    "explained",
    "import_users_code",
    "in_short",
    "refuse_unknown_arguments",
    "users_line",
]

_MOST_LINES, _LONGEST = 3, 300


def import_users_code(config: RunConfig, *, model_alone: bool = False) -> None:
    """Import what a request names of model, data, loss and metrics, or of its model alone.

    A module may draw random numbers when it is imported. It is imported here and not where it is first used, which may
    be for the data on one rank and for the model on another.

    Raises:
        RequestError: modules cannot be imported, or lack what is named; it contains every problem.
    """
    others = {
        "data.target": config.data.target,
        "loss.target": config.loss.target,
        **({} if config.data.collate is None else {"data.collate": config.data.collate}),
        **{f"metrics.{name}": target for name, target in config.metrics.items()},
    }
    targets = {"model.target": config.model.target} | ({} if model_alone else others)
    problems: list[Problem] = []
    with seeded(config.seed, "import"):
        for path, target in targets.items():
            try:
                import_target(path, target)
            except RequestError as error:
                problems += error.problems
    raise_problems(problems)


def call_target(section: str, target: str, kwargs: Mapping[str, Any]) -> Any:
    """Call the target of a section with its ``kwargs``.

    Raises:
        RequestError: the function refuses the arguments (a ``TypeError`` at the call itself), or raises.
    """
    return call_function(section, target, import_target(f"{section}.target", target), kwargs)


def call_function(section: str, target: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that belongs to the target of a section, as :func:`call_target` calls the target itself."""
    _refuse_wrong_arguments(section, function, kwargs)
    try:
        with hearing():
            return function(**with_environment(dict(kwargs)))
    except (RunnerError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, Exception) and detect_fake_mode() is not None:  # the call may succeed without fake tensors
            raise
        raise RequestError(
            [Problem(f"{section}.target", target, f"must make the {section}", explained(error))]
        ) from error


def explained(error: BaseException) -> str:
    """``ValueError: message (file.py:12 in function)``, with the innermost frame outside installed packages."""
    text = in_short(error)
    frames = [one for one in extract_tb(error.__traceback__) if is_users_file(one.filename)]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else text


def in_short(error: BaseException) -> str:
    """``ValueError: message``; of a message of many lines the beginning, as one line."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return shorten(text, _LONGEST, placeholder=" …") if text.count("\n") > _MOST_LINES else text


def users_line(error: BaseException) -> str | None:
    """The innermost line of users' code in an error, as it is written, with its place; None if there is none."""
    frames = [one for one in extract_tb(error.__traceback__) if is_users_file(one.filename)]
    if not frames:
        return None
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}"
    return f"`{frames[-1].line}` ({place})" if frames[-1].line else place


def refuse_unknown_arguments(section: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse names in ``kwargs`` that a function does not take, where others of its arguments are given later.

    Raises:
        RequestError: an argument is unknown.
    """
    import inspect

    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if all(each.kind != each.VAR_KEYWORD for each in parameters.values()):
        called = getattr(function, "__name__", function)
        unknown = [key for key in kwargs if key not in parameters]
        raise_problems(_unknown(section, key, kwargs[key], called, list(parameters)) for key in unknown)


def _refuse_wrong_arguments(section: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values()]
        unknown = [key for key in kwargs if key not in names]
        called = getattr(function, "__name__", function)
        if unknown:
            raise RequestError([_unknown(section, key, kwargs[key], called, names) for key in unknown]) from error
        rule = f"must be arguments of {called}{signature}"
        raise RequestError([Problem(f"{section}.kwargs", dict(kwargs), rule, str(error))]) from error


def _unknown(section: str, key: str, value: object, called: object, names: Sequence[str]) -> Problem:
    """The problem of an argument that a user's function does not have."""
    near = did_you_mean(key, names)
    why = f"Its arguments are {', '.join(names)}" if names else "It has no arguments"
    fix = f"{section}.kwargs.{near}={value}" if near is not None else ""
    return Problem(f"{section}.kwargs.{key}", value, f"is no argument of {called}", why, fix)
