"""The keys of a request as its help and its documents list them: default, values and meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, NamedTuple

from runner.config.compose.field_comments import field_comments
from runner.config.schema import RunConfig

__all__ = ["Key", "keys_of", "section_of", "sections"]


class Key(NamedTuple):
    """A key of a request.

    Args:
        path: its name, with that of its section.
        default: the schema's default, as it is typed; ``???`` where an option sets it.
        kind: the type of its values, as the schema names it.
        about: what it means.
    """

    path: str
    default: str
    kind: str
    about: str


def section_of(item: Field[Any]) -> Any:
    """The section that a field of a request holds; None if it is a key itself."""
    factory = item.default_factory
    return factory if factory is not MISSING and is_dataclass(factory) else None


def sections() -> list[str]:
    """The names of all sections."""
    return [item.name for item in fields(RunConfig) if section_of(item) is not None]


def keys_of(names: Sequence[str] | None) -> Iterator[Key]:
    """The keys of these sections, of which a key outside of all sections is one; None: of all.

    A section's name, which an option sets, and what goes with it, are left out.
    """
    for item in fields(RunConfig):
        section = section_of(item)
        if names is not None and item.name not in names:
            continue
        if section is None:
            yield _key(item.name, item, RunConfig.__name__)
            continue
        for inner in fields(section):
            if inner.name not in ("name", "goes_with"):
                yield _key(f"{item.name}.{inner.name}", inner, section.__name__)


def _key(path: str, item: Field[Any], section: str) -> Key:
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    comment = field_comments().get((section, item.name))
    about = comment.about if comment is not None else ""
    return Key(path, _shown(default), str(item.type), about or item.metadata.get("about", ""))


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace(" ", "")
