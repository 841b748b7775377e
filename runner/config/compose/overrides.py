"""Command-line overrides: parsed by Hydra's grammar, checked against our schema, with all problems at once."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.compose.groups import MAY_BE_NULL, RECIPE, groups, in_no_group, no_group, options
from runner.config.compose.layers import Layer
from runner.config.compose.shape import check_value, key_paths, type_at, unknown_key
from runner.config.compose.synonyms import ACCUMULATED, meant, no_option, option_called
from runner.errors import Problem, did_you_mean, typed_word

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override, RangeSweep

__all__ = ["SEVERAL", "Axis", "Request", "axes_of", "read_overrides", "settings_of", "typed_layers"]

SEVERAL = {"logger": "logger.others"}
"""Groups of which a request may choose several options, and the key that holds those after the first."""

_OF_GRAMMAR = frozenset("'\"\\,[]{}()=$")
"""Characters that mean something in a value."""

_QUOTED_NAME = re.compile(r"""(?<=[{,\s])(['"])([\w.*/-]+)\1\s*:""")

_PARTS = "schedule.microbatches="

_OF_MANY_NAMES = ("hardware",)
"""Groups whose options are things that have several names, each of which chooses the option."""


@dataclass(frozen=True, slots=True)
class Request:
    """The content of a command line.

    Args:
        choices: group to option; None for a group that is switched off (``recipe=null``).
        settings: the other overrides, in Hydra's form, in order.
        named: keys that settings name.
        typed: the settings as they were typed.
    """

    choices: dict[str, str | None]
    settings: tuple[str, ...]
    named: frozenset[str]
    typed: tuple[str, ...]


def _parse(line: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(line)


def _parsed(lines: Iterable[str]) -> tuple[list[tuple[str, Override]], list[Problem]]:
    from hydra.errors import HydraException

    parsed: list[tuple[str, Override]] = []
    problems: list[Problem] = []
    for line in lines:
        for form in dict.fromkeys((line, _in_quotes(line), _with_plain_names(line))):
            try:
                parsed.append((form, _parse(form)))
                break
            except HydraException:
                continue
        else:
            problems.append(_unreadable(line))
    return parsed, problems


def _in_quotes(line: str) -> str:
    """An override whose value has letters beyond ASCII, such as a folder's name, in quotes, without which Hydra cannot
    read it; any other one as it is, and also one that has what the grammar gives a meaning."""
    key, equals, value = line.partition("=")
    is_plain = equals and not value.isascii() and value.isprintable() and not _OF_GRAMMAR & set(value)
    return f'{key}="{value}"' if is_plain else line


def _with_plain_names(line: str) -> str:
    """An override whose mapping has names in quotes, as JSON and Python have them, without these: Hydra's have none."""
    key, equals, value = line.partition("=")
    return key + equals + _QUOTED_NAME.sub(r"\2:", value) if value.startswith("{") else line


def _unreadable(line: str) -> Problem:
    key, equals, value = line.partition("=")
    why = "Keys are joined by dots; text with blanks, commas, quotes or brackets stands in quotes, e.g. 'name=\"a, b\"'"
    if line.startswith("-"):
        return Problem(
            "argument",
            line,
            "there is no such flag here",
            "Flags stand in the help of the command, overrides are KEY=VALUE",
        )
    if not equals:
        return Problem("argument", line, "an override is KEY=VALUE", why)
    if (number := _number(value.rstrip(",;"))) is not None:
        return Problem(key, value, "the value cannot be read", "A number has nothing after it", f"{key}={number}")
    return Problem(key, value, "the value cannot be read", why, typed_word(key, value.strip('"')))


def _number(text: str) -> str | None:
    try:
        return text if math.isfinite(float(text)) else None
    except ValueError:
        return None


def read_overrides(lines: Sequence[str], roots: Sequence[Path]) -> tuple[Request, list[Problem]]:
    """The request of a command line, and all problems with it."""
    parsed, problems = _parsed(lines)
    choices: dict[str, str | None] = {}
    settings: list[str] = []
    typed: list[str] = []
    named: set[str] = set()
    known_groups = groups()
    for line, override in (each for one in parsed for each in _one_by_one(*one)):
        found = _refused(line, override)
        if not found and override.key_or_group in known_groups and not _is_section(override):
            found = _choose(override, roots, choices)
        elif not found:
            found = _check_setting(override, known_groups, roots)
            settings.append(_as_setting(line, override))
            typed.append(line)
            named.add(override.key_or_group)
        problems += found
    problems = [_of_whole_steps(problem, settings) for problem in problems]
    return Request(choices, tuple(settings), frozenset(named), tuple(typed)), problems


def _of_whole_steps(problem: Problem, settings: Sequence[str]) -> Problem:
    """The problem of a number of accumulated batches, with an override of the batch size that keeps their size."""
    number = problem.fix.removeprefix(_PARTS)
    if problem.path.rpartition(".")[2] not in ACCUMULATED or not number.isdigit():
        return problem
    for each in map(_parse, settings):
        size = each.value()
        if each.key_or_group == "data.batch_size" and isinstance(size, int):
            return replace(problem, fix=f"{problem.fix} data.batch_size={size * int(number)}")
    return problem


def _one_by_one(line: str, override: Override) -> Iterator[tuple[str, Override]]:
    """An override that chooses several options, where a group takes them: the first one, and a key with the others."""
    value = override.value() if not override.is_sweep_override() else None
    key = SEVERAL.get(override.key_or_group)
    if key is None or not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        yield line, override
        return
    first, *others = value
    for each in (f"{override.key_or_group}={json.dumps(first)}", f"{key}=[{','.join(map(json.dumps, others))}]"):
        yield each, _parse(each)


def typed_layers(request: Request) -> Iterator[Layer]:
    """What each setting of the command line sets; one that takes an entry of kwargs away sets nothing."""
    for setting, line in zip(request.settings, request.typed, strict=True):
        override = _parse(setting)
        if override.is_delete():
            continue
        content: Any = override.value()
        for key in reversed(override.key_or_group.split(".")):
            content = {key: content}
        yield Layer(line, content, is_typed=True)


def _is_section(override: Override) -> bool:
    return isinstance(override.value(), dict)


def _refused(line: str, override: Override) -> list[Problem]:
    key = override.key_or_group
    shown = line.partition("=")[2]
    if override.is_sweep_override():
        return [Problem(key, shown, "several values make a sweep", "A plain command runs one job", f"{line} -m")]
    if override.is_hydra_override():
        why = "The runner starts, names and places its runs itself"
        fix = shlex.quote(f"run_dir={shown}") if key in ("hydra.run.dir", "hydra.sweep.dir") else ""
        return [Problem(key, shown, "Hydra's own settings are not used", why, fix)]
    if override.package is not None:
        why = "Every option has one place in a request"
        return [Problem(f"{key}@{override.package}", shown, "packages cannot be renamed", why, f"{key}={shown}")]
    if override.is_delete() and ".kwargs." not in key:
        near = f"{key}=null" if key == RECIPE else ""
        return [Problem(f"~{key}", shown, "only entries of kwargs can be taken away", "", near)]
    return []


def _choose(override: Override, roots: Sequence[Path], choices: dict[str, str | None]) -> list[Problem]:
    group, value = override.key_or_group, override.value()
    known = options(group, roots)
    if value is None and group in MAY_BE_NULL:
        choices[group] = None
        return []
    name = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if name is not None and name not in known and group in _OF_MANY_NAMES:
        name = option_called(group, name) or name
    if name is not None and group in choices and choices[group] != name:
        kept = name if name in known else choices[group]
        return [Problem(group, name, f"it is chosen twice, also {choices[group]}", "", f"{group}={kept}")]
    lost = in_no_group(group, name, roots, is_known=name in known) if name is not None else []
    if lost:
        return lost
    if name in known:
        choices[group] = name
        return []
    return [no_option(group, value, known)]


def _check_setting(override: Override, known_groups: Sequence[str], roots: Sequence[Path]) -> list[Problem]:
    key, value = override.key_or_group, override.value()
    annotation = type_at(key)
    if override.is_delete() and annotation is not None:
        return []
    if annotation is None:
        if "." not in key and not any(path.startswith(f"{key}.") for path in key_paths()):
            folder = next((root / key for root in roots[1:] if (root / key).is_dir()), None)
            if folder is not None:
                return [no_group(key, value, folder)]
            near = did_you_mean(key, known_groups) if meant(key, value) is None else None
            if near is not None and str(value) in options(near, roots):
                return [Problem(key, value, "there is no such key", "", f"{near}={value}")]
        return [unknown_key(key, value)]
    if key == "resume" and value is True:
        return [Problem(key, "true", "must be auto, a checkpoint or null", "", "resume=auto")]
    return check_value(annotation, value, key)[1]


def _as_setting(line: str, override: Override) -> str:
    if override.is_delete():
        return line
    # The schema has been checked; `++` lets Hydra set a key that no file mentions.
    return f"++{override.key_or_group}={override.get_value_string()}"


def settings_of(request: Request) -> list[tuple[str, Any]]:
    """The keys that the settings of a checked request name, with their values as plain containers."""
    return [(override.key_or_group, override.value()) for override in map(_parse, request.settings)]


@dataclass(frozen=True, slots=True)
class _OptionNames:
    """The part of a config loader that Hydra's ``glob`` uses."""

    roots: tuple[Path, ...]

    def get_group_options(self, group_name: str, results_filter: Any = None) -> list[str]:
        return list(options(group_name, self.roots))


@dataclass(frozen=True, slots=True)
class Axis:
    """The values that a sweep gives one key.

    Args:
        count: how many there are.
        values: lists them as overrides, at each call anew.
    """

    count: int
    values: Callable[[], Iterator[str]]


def axes_of(lines: Sequence[str], roots: Sequence[Path]) -> tuple[list[Axis], list[Problem]]:
    """The axes of a sweep, whose product are its jobs; the last override varies fastest. No value is listed yet.

    ``a=1,2``, ``choice()``, ``range()`` and ``glob()`` are Hydra's syntax.
    """
    from hydra.core.override_parser.types import RangeSweep
    from hydra.errors import HydraException

    parsed, problems = _parsed(lines)
    axes: dict[str, Axis] = {}
    for line, override in parsed:
        key = override.get_key_element()
        if not override.is_sweep_override():
            axes[key] = Axis(1, partial(iter, [line]))
            continue
        override.config_loader = _OptionNames(tuple(roots))  # type: ignore[assignment]
        values, swept = partial(_swept, key, override), override.value()
        try:
            count = _length(swept) if isinstance(swept, RangeSweep) else sum(1 for _ in values())
        except (HydraException, ValueError) as error:
            problems.append(Problem(key, line.partition("=")[2], "this sweep cannot be listed", str(error)))
            continue
        axes[key] = Axis(count, values)
        if not count:
            problems.append(Problem(key, line.partition("=")[2], "nothing matches, so that there is no job"))
    return list(axes.values()), problems


def _swept(key: str, override: Override) -> Iterator[str]:
    for value in override.sweep_string_iterator():
        yield f"{key}={value}"


def _length(swept: RangeSweep) -> int:
    """The number of values of ``range()``, without listing them.

    Raises:
        ValueError: its ends or its step are missing, or it has no end.
    """
    if swept.start is None or swept.stop is None or not swept.step:
        raise ValueError("range() needs a start, an end and a step that is not 0")
    return max(0, math.ceil((swept.stop - swept.start) / swept.step))
