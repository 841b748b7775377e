"""Reads the comments beside the fields of the schema: what a key is, and what other tools call it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import runner.config.schema as schema

__all__ = ["FieldComment", "also_of", "field_comments"]

_FIELD = re.compile(r"    (\w+): [^#]*(?:#\s*(?:noqa: \w+ - )?(.+))?")
_SECTION = re.compile(r"class (\w+):")
_ALSO = re.compile(r"\s*# also(?: (?P<key>[\w.]+))?: *(?P<names>.+)")


class FieldComment(NamedTuple):
    """What stands beside a field.

    Args:
        about: what the key is, which the help shows; empty where nothing stands beside it.
        also: the names of other tools, from the lines below it.
    """

    about: str
    also: tuple[str, ...]


def also_of(line: str) -> tuple[str, tuple[str, ...]]:
    """The key that a line of other tools' names is about, empty if it says none, and the names; none in other lines."""
    match = _ALSO.fullmatch(line)
    if match is None:
        return "", ()
    return match["key"] or "", tuple(each.strip() for each in match["names"].split(",") if each.strip())


@cache
def field_comments() -> dict[tuple[str, str], FieldComment]:
    """The comments of every field of the schema, by the names of its class and of the field."""
    found: dict[tuple[str, str], FieldComment] = {}
    section = name = ""
    for line in Path(schema.__file__).read_text(encoding="utf-8").splitlines():
        if (header := _SECTION.match(line)) is not None:
            section = header[1]
        elif more := also_of(line)[1]:
            about, also = found[section, name]
            found[section, name] = FieldComment(about, also + more)
        elif (match := _FIELD.fullmatch(line)) is not None:
            name = match[1]
            found[section, name] = FieldComment(match[2] or "", ())
    return found
