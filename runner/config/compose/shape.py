"""Checks plain containers against the typed schema: all unknown keys and wrong types at once.

Hydra accepts ``+typo`` even under a structured schema and stops at the first problem that it finds. Here one walk over
the schema's dataclasses serves command-line values, option files and saved configurations alike.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from runner.config.compose.synonyms import Meant, meant, option_called
from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean

__all__ = ["MISSING", "build", "check_value", "describe", "key_paths", "type_at", "unknown_key"]

# OmegaConf's marker for a value that must be given.
MISSING = "???"

Section = TypeVar("Section")


@cache
def _hints(section: Any) -> dict[str, Any]:
    return get_type_hints(section)


def _is_section(annotation: Any) -> bool:
    return is_dataclass(annotation)


@cache
def key_paths(section: Any = RunConfig) -> tuple[str, ...]:
    """Every key of ``section`` that holds a value, with dots, in the order of the schema."""
    paths: list[str] = []
    for name, annotation in _hints(section).items():
        if _is_section(annotation):
            paths += [f"{name}.{below}" for below in key_paths(annotation)]
        else:
            paths.append(name)
    return tuple(paths)


_YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}
"""What other tools take for true and false, as YAML 1.1 does."""


def type_at(path: str) -> Any:
    """The annotation of the key ``path`` of a :class:`RunConfig`, or None if there is no such key."""
    annotation: Any = RunConfig
    for part in path.split("."):
        if _is_section(annotation):
            annotation = _hints(annotation).get(part)
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif annotation is not Any:
            return None
        if annotation is None:
            return None
    return annotation


def unknown_key(path: str, value: object, *, where: str = "") -> Problem:
    """The problem of a key that the schema does not have, with a similar existing key that takes the value."""
    found, near = meant(path, value), _longer_name(path, value)
    if near is None and found is not None:
        return _called_otherwise(path, value, found, where)
    near = near or _nearest_path(path)
    if near is not None and not check_value(type_at(near), value, near)[1]:
        return Problem(where + path, _shown(value), "there is no such key", fix=f"{near}={_shown(value)}")
    near = _nearest_section(path) if isinstance(value, Mapping) else None
    if near is not None:
        return Problem(where + path, _shown(value), "there is no such key", fix=f"{near}: {_shown(value)}")
    section = path.rpartition(".")[0]
    known = type_at(section) if section else None
    why = "The help of a command lists the keys, e.g. runner train --help"
    if known is not None and _is_section(known):
        names = [item.name for item in fields(known)]
        why = f"{section} has {', '.join(names)}"
        if {"target", "kwargs"} <= {*names}:
            why += f"; an argument of its target is {section}.kwargs.{path.rpartition('.')[2]}"
    return Problem(where + path, _shown(value), "there is no such key", why)


def _called_otherwise(path: str, value: object, found: Meant, where: str) -> Problem:
    """The problem of a key of another tool, with ours if it takes the value."""
    ours = value if found.value is None else {"true": True, "false": False}.get(found.value, found.value)
    if isinstance(ours, float) and ours.is_integer() and check_value(type_at(found.key), ours, found.key)[1]:
        ours = int(ours)  # epochs, which others count in fractions
    if _is_section(type_at(found.key)):
        takes = option_called(found.key, ours) is not None
    else:
        takes = not check_value(type_at(found.key), ours, found.key)[1]
    why = f"{found.key}: {found.about}" if found.about else "" if takes else f"Here it is {found.key}"
    return Problem(where + path, _shown(value), "there is no such key", why, f"{found.key}={_shown(ours)}" * takes)


def _longer_name(path: str, value: object) -> str | None:
    """The only key of the section named in ``path`` whose name has all its words and more, if it takes the value.

    So ``trainer.steps`` means ``trainer.max_steps``, and not the ``steps`` of another section.
    """
    section, _, last = path.rpartition(".")
    words = set(last.split("_"))
    near = [each for each in key_paths() if section and words < set(each.removeprefix(f"{section}.").split("_"))]
    near = [each for each in near if each.rpartition(".")[0] == section]
    return near[0] if len(near) == 1 and not check_value(type_at(near[0]), value, near[0])[1] else None


def _nearest_path(path: str) -> str | None:
    mended = _with_names_mended(path)
    if mended is not None:
        return mended
    section, _, last = path.rpartition(".")
    known = key_paths()
    same_leaf = [each for each in known if each.rpartition(".")[2] == last]
    is_of_no_section = section != "" and same_leaf == [last]  # checkpoint.resume is meant as resume
    if len(same_leaf) == 1 and (is_of_no_section or not _is_text(type_at(same_leaf[0]))):
        return same_leaf[0]  # a text fits everywhere: config=FILE is not meant as zero.config
    if any(each.rpartition(".")[0] == section for each in known):
        return None  # the section is right, so a similar section name would not help
    return did_you_mean(path, known)


def _is_text(annotation: Any) -> bool:
    return str in (annotation, *get_args(annotation))


def _nearest_section(path: str) -> str | None:
    """The section of which ``path`` is a slip, such as that of a whole section in a file."""
    near = _mended_names(path)
    return near if near is not None and near != path and _is_section(type_at(near)) else None


def _with_names_mended(path: str) -> str | None:
    """The key that holds a value, or the name in a mapping, of which ``path`` is a slip; None if there is none."""
    near = _mended_names(path)
    annotation = type_at(near) if near is not None and near != path else None
    return near if annotation is not None and not _is_section(annotation) else None


def _mended_names(path: str) -> str | None:
    """The path with every unknown name of a section or mapping as the existing one of which it is a slip.

    Names within a mapping are the user's own: ``mertics.error`` means ``metrics.error``. None if a name is no slip.
    """
    mended: list[str] = []
    for name in path.split("."):
        annotation = type_at(".".join(mended)) if mended else RunConfig
        if _is_section(annotation) and name not in _hints(annotation):
            near = did_you_mean(name, _hints(annotation))
            if near is None:
                return None
            mended.append(near)
        else:
            mended.append(name)
    return ".".join(mended)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(inner)}" for key, inner in value.items()) + "}"
    return str(value)


def describe(annotation: Any) -> str:
    """The type in words, as messages show it."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "anything"}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if _is_section(annotation):
        return "a section of keys"
    if origin is list:
        return f"a list, each entry {describe(arguments[0])}"
    if origin is dict:
        return f"a mapping of {'whole numbers' if arguments[0] is int else 'names'} to values"
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is types.NoneType else describe(each) for each in arguments)
    return words[annotation]


def check_value(annotation: Any, value: object, path: str, *, where: str = "") -> tuple[object, list[Problem]]:
    """Convert ``value`` to the schema's type, and list all problems in it.

    Text that interpolates (``${...}``) or is marked as missing is left unchanged, because its value is not known yet.

    Args:
        annotation: the type, as the schema writes it.
        value: a plain container or value.
        path: its dotted key.
        where: a prefix of every problem's path, e.g. the name of the file.
    """
    if isinstance(value, str) and (value == MISSING or "${" in value):
        return value, []
    if _is_section(annotation):
        return _check_section(annotation, value, path, where)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value, []
    if origin in (Union, types.UnionType):
        inner = next(each for each in arguments if each is not types.NoneType)
        return (None, []) if value is None else _retyped(check_value(inner, value, path, where=where), annotation)
    if origin is list and isinstance(value, list):
        return _check_items(arguments[0], enumerate(value), path, where, as_list=True)
    if origin is dict and isinstance(value, Mapping):
        if arguments[0] is int:  # JSON knows no keys but text
            numbers = {_scalar(int, int(key) if str(key).isdecimal() else key): each for key, each in value.items()}
            if None in numbers:
                return value, [Problem(where + path, _shown(value), f"must be {describe(annotation)}")]
            value = numbers
        return _check_items(arguments[1], value.items(), path, where, as_list=False)
    converted = _scalar(annotation, value)
    if converted is not None:
        return converted, []
    why = f"It is {_kind(value)}" + (f"; an entry is set by {path}.NAME=VALUE" if origin is dict and not where else "")
    fix = _as_entry(arguments[0], value, path) if origin is list and not where else ""
    if annotation is bool and str(value) in _YAML_1_1 and not where:
        fix = f"{path}={_YAML_1_1[str(value)]}"
    if "example" in _beside(path) and not fix and not where:
        fix = f"{path}={_beside(path)['example']}"
    return value, [Problem(where + path, _shown(value), f"must be {describe(annotation)}", why, fix)]


def _as_entry(annotation: Any, value: object, path: str) -> str:
    """The override for a single value where a list is wanted, or for a number of devices; empty if there is none."""
    if path == "parallelism.devices" and isinstance(value, int) and value > 0:
        return f"parallelism.ranks={value}"
    names = _beside(path).get("names", (value,))
    entry = value if value in names else did_you_mean(str(value), names) or names[0]
    return f"{path}=[{entry}]" if isinstance(annotation, type) and isinstance(value, annotation) else ""


def _beside(path: str) -> Mapping[Any, Any]:
    """What the schema says of a key beside its type: an example, or the names of which it is a list."""
    section, _, name = path.rpartition(".")
    found = type_at(section)
    return next((each.metadata for each in fields(found) if each.name == name), {}) if _is_section(found) else {}


def _retyped(result: tuple[object, list[Problem]], annotation: Any) -> tuple[object, list[Problem]]:
    value, problems = result
    if len(problems) == 1 and problems[0].rule.startswith("must be ") and get_origin(get_args(annotation)[0]) is None:
        only = problems[0]
        problems = [replace(only, rule=f"must be {describe(annotation)}")]
    return value, problems


def _check_items(annotation: Any, items: Any, path: str, where: str, *, as_list: bool) -> tuple[object, list[Problem]]:
    checked: dict[Any, object] = {}
    problems: list[Problem] = []
    for key, value in items:
        below = f"{path}[{key}]" if as_list else f"{path}.{key}"
        checked[key], found = check_value(annotation, value, below, where=where)
        problems += found
    return (list(checked.values()) if as_list else checked), problems


def _check_section(section: type, value: object, path: str, where: str) -> tuple[object, list[Problem]]:
    if not isinstance(value, Mapping):
        is_target = ":" in str(value) and "target" in _hints(section) and not where
        fix = f"{path}.target={value}" if is_target else ""
        return value, [Problem(where + path, _shown(value), "must be a section of keys", f"It is {_kind(value)}", fix)]
    hints = _hints(section)
    checked: dict[str, object] = {}
    problems: list[Problem] = []
    for name, inner in value.items():
        below = f"{path}.{name}" if path else str(name)
        if name not in hints:
            told = _no_key_of if path.endswith("]") else _unknown
            problems.append(told(section, below, inner, where))
            continue
        checked[name], found = check_value(hints[name], inner, below, where=where)
        problems += found
    return checked, problems


def _unknown(section: type, path: str, value: object, where: str) -> Problem:
    return unknown_key(path, value, where=where)


def _no_key_of(section: type, path: str, value: object, where: str) -> Problem:
    """The problem of an unknown key of an entry of a list, which no override sets by itself."""
    name, known = path.rpartition(".")[2], list(_hints(section))
    near = did_you_mean(name, known)
    why = f"An entry has {', '.join(known)}"
    return Problem(where + path, _shown(value), "there is no such key", why, f"{near}: {_shown(value)}" if near else "")


def _scalar(annotation: Any, value: object) -> object | None:
    if annotation is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if annotation is int:
        return value if isinstance(value, int) else None
    if annotation is float:
        return float(value) if isinstance(value, int | float) else None
    if annotation is str:
        return str(value) if isinstance(value, str | int | float) else None
    return None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    words = {bool: "true or false", int: "a whole number", float: "a fraction", str: "text", list: "a list"}
    return words.get(type(value), "a mapping")


def build(section: type[Section], value: object) -> tuple[Section | None, list[Problem]]:
    """An instance of the schema class ``section``; absent keys take its defaults.

    The instance is None if there are problems.
    """
    checked, problems = check_value(section, value, "")
    if problems or not isinstance(checked, Mapping):
        return None, problems
    return _instance(section, checked), []


def _instance(section: type[Section], values: Mapping[str, Any]) -> Section:
    hints = get_type_hints(section)
    return section(**{name: _of_type(hints[name], value) for name, value in values.items()})


def _of_type(annotation: Any, value: Any) -> Any:
    """The checked value with instances for its sections."""
    if _is_section(annotation):
        return _instance(annotation, value)
    if get_origin(annotation) is dict and _is_section(get_args(annotation)[1]):
        return {name: _instance(get_args(annotation)[1], each) for name, each in value.items()}
    if get_origin(annotation) is list and _is_section(get_args(annotation)[0]):
        return [_instance(get_args(annotation)[0], each) for each in value]
    return value
