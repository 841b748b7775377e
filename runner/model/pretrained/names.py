"""A map from the names of another convention to a model's own, ``model.pretrained_names``.

The file is YAML: regular expressions of whole names, in order; the first that fits decides. Its value is the model's
name, in which ``\\1`` is the expression's first group, or null for a tensor that the model does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from runner.errors import Problem, RequestError

__all__ = ["NameMap", "read_name_map", "renamed"]

PATH = "model.pretrained_names"

NameMap = Mapping[re.Pattern[str], "str | None"]


def read_name_map(file: str) -> NameMap:
    """The expressions of a file, with what they stand for.

    Raises:
        RequestError: there is no such file, or it is no such map.
    """
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _refused(file, "must be a YAML file", f"{error}") from error
    if not isinstance(content, dict) or not all(isinstance(value, str | None) for value in content.values()):
        raise _refused(file, "must map expressions of names to names, or to null")
    found: dict[re.Pattern[str], str | None] = {}
    for pattern, name in content.items():
        try:
            compiled = re.compile(str(pattern))
            if name is not None:
                _check_groups(compiled, name)
        except (re.error, IndexError) as error:
            raise _refused(file, f"must have regular expressions: {pattern}: {name}", str(error)) from error
        found[compiled] = name
    return found


def _check_groups(pattern: re.Pattern[str], name: str) -> None:
    """Raise ``re.error`` if a name uses a group that its expression does not have."""
    for group in re.findall(r"\\(\d+)", name):
        if int(group) > pattern.groups:
            raise re.error(f"it has no group {group}")


def renamed(name: str, names: NameMap) -> str | None:
    """The model's name of a tensor; None if the model does not have it. A name that nothing fits stays."""
    for pattern, own in names.items():
        match = pattern.fullmatch(name)
        if match is not None:
            return match.expand(own) if own is not None else None
    return name


def _refused(file: str, rule: str, why: str = "") -> RequestError:
    return RequestError([Problem(PATH, file, rule, why)])
