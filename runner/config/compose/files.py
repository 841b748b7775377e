"""Checks option files against the schema, so that a mistake is reported with the name of its file."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.compose.groups import RECIPE, groups, options, package_of
from runner.config.compose.shape import check_value, type_at
from runner.config.compose.synonyms import no_option
from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean

__all__ = ["check_file", "read_option", "sweep_of"]


def read_option(path: Path) -> dict[str, Any]:
    """An option file as a plain container; interpolations stay text.

    Raises:
        ValueError: it is not a YAML mapping; the message says where.
    """
    try:
        now = path.stat()
    except OSError as error:
        raise ValueError(str(error)) from error
    return copy.deepcopy(_read(path, now.st_mtime_ns, now.st_size, now.st_ino))


@functools.lru_cache(maxsize=1024)
def _read(path: Path, *_as_it_is_now: int) -> dict[str, Any]:
    """Read an option file again only when it has changed: a sweep asks for the same files for every job."""
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.load(path)
        container = OmegaConf.to_container(content, resolve=False)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"no valid YAML{place}: {getattr(error, 'problem', None) or error}") from error
    except (OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, DictConfig) or not isinstance(container, dict):
        raise ValueError("it must be a mapping of keys")
    return {str(key): value for key, value in container.items()}


def check_file(path: Path, group: str, roots: Sequence[Path]) -> list[Problem]:
    """Everything in an option file that the schema does not know, and references to options that do not exist."""
    try:
        content = read_option(path)
    except ValueError as error:
        return [Problem(str(path), group, str(error))]
    where = f"{path}: "
    problems = _check_defaults(content.pop("defaults", []), group, where, roots)
    package = package_of(path, group)
    if group == RECIPE and package != "_global_":
        why = "A recipe overrides the whole request"
        return [*problems, Problem(str(path), package, "a recipe's first line is `# @package _global_`", why)]
    if package == "_global_":
        problems += sweep_of(path, content)[1]
        content.pop("sweep", None)
    annotation: Any = RunConfig if package == "_global_" else type_at(package)
    if annotation is None:
        return [*problems, Problem(str(path), package, "there is no such section to put its keys in")]
    return problems + check_value(annotation, content, "" if package == "_global_" else package, where=where)[1]


def sweep_of(path: Path, content: Mapping[str, Any]) -> tuple[dict[str, list[Any]], list[Problem]]:
    """The values of each key that a recipe varies, and everything that is wrong with them."""
    asked = content.get("sweep") or {}
    where = f"{path}: sweep"
    if not isinstance(asked, Mapping):
        why = f"It is {_kind(asked)}; e.g. `sweep: {{optimizer.lr: {_as_list(asked)}}}` makes a job for each value"
        return {}, [Problem(where, asked, "must be keys with lists of values", why)]
    problems = [
        Problem(f"{where}.{key}", values, "must be a list", f"It is {_kind(values)}", f"{key}: {_as_list(values)}")
        for key, values in asked.items()
        if not isinstance(values, list)
    ]
    return {str(key): values for key, values in asked.items() if isinstance(values, list)}, problems


def _kind(value: object) -> str:
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list) else "one value"


def _as_list(value: object) -> str:
    """The list in YAML of values that were written as a command line has them, with commas between them."""
    values = value if isinstance(value, list) else str(value).split(",")
    return "[" + ", ".join(str(each).strip() for each in values) + "]"


def _check_defaults(entries: object, group: str, where: str, roots: Sequence[Path]) -> list[Problem]:
    if not isinstance(entries, list):
        return [Problem(f"{where}defaults", entries, "must be a list")]
    problems: list[Problem] = []
    for entry in entries:
        if isinstance(entry, str):
            if entry != "_self_" and entry.lstrip("/") not in options(group, roots):
                problems.append(
                    Problem(
                        f"{where}defaults", entry, "there is no such option", f"It would be one of the group {group}"
                    )
                )
            continue
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            problems += _check_choice(str(key), value, where, roots)
    return problems


def _check_choice(key: str, value: object, where: str, roots: Sequence[Path]) -> list[Problem]:
    group = key.removeprefix("optional ").removeprefix("override ").strip().lstrip("/").partition("@")[0]
    if group not in groups():
        near = did_you_mean(group, groups())
        return [Problem(f"{where}defaults", key, "there is no such group", f"Did you mean {near}" if near else "")]
    known = options(group, roots)
    if value is None or str(value) in known or key.startswith("optional "):
        return []
    found = no_option(group, value, known)
    return [replace(found, path=f"{where}{group}", fix=found.fix.replace("=", ": "))]
