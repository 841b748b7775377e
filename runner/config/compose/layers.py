"""The files and overrides that a request lies in, one over the other, and what follows from their order.

A later layer wins over an earlier one key by key. So each key has one source, the last layer that sets it; and the
arguments of a function that a later layer replaces by another function have to be taken out again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from runner.config.schema import RunConfig

__all__ = [
    "SHIPPED",
    "USUAL_LENGTH",
    "Layer",
    "leaves",
    "longest_of_folder",
    "sizes_of_folder",
    "sources",
    "without_arguments_of_others",
    "without_sizes_of_fresh_models",
]

DEFAULT, DERIVED = "default", "follows from other keys"

_OF_TARGET = ("kwargs", "needs")  # keys of a section that belong to the function that its `target` names
_NOT_GIVEN = (None, "???")

SHIPPED = "runner/conf/"
"""How the package's own files are shown."""

USUAL_LENGTH = 2048
"""Tokens of a row with which language models are commonly tuned."""

_OF_NO_DATA = "random_tokens"  # the option where no data is named
_LENGTH, _VOCABULARY = "sequence_length", "vocab_size"  # of its rows; the second one is in files of transformers, too
_LENGTHS_OF_MODELS = ("max_position_embeddings", "n_positions")  # in files of transformers


@dataclass(frozen=True, slots=True)
class Layer:
    """What one file or one override sets.

    Args:
        source: the file as it is shown, or the override as it was typed.
        content: a part of the request, as nested dictionaries.
        is_typed: whether it stands on the command line.
    """

    source: str
    content: Mapping[str, Any]
    is_typed: bool = False


def leaves(path: str, value: object) -> Iterator[tuple[str, Any]]:
    """Every key below ``path`` that holds a value, with dots; an empty dictionary is a value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value


def sources(container: Mapping[str, Any], layers: Sequence[Layer], defaults: Mapping[str, Any]) -> dict[str, str]:
    """For every key of a resolved request what set it: a file, an override, the schema, or other keys.

    Args:
        container: the resolved request.
        layers: what it was made of, the winning ones last.
        defaults: the schema's own values.
    """
    set_by = {path: layer.source for layer in layers for path, _ in leaves("", layer.content)}
    own = dict(leaves("", defaults))
    return {path: _source(path, value, set_by, own) for path, value in leaves("", container)}


def _source(path: str, value: object, set_by: Mapping[str, str], defaults: Mapping[str, Any]) -> str:
    if path in set_by:
        return set_by[path]
    return DEFAULT if path in defaults and defaults[path] == value else DERIVED


def without_arguments_of_others(container: dict[str, Any], layers: Sequence[Layer]) -> dict[str, Any]:
    """``container`` without the arguments that a layer gave to a function which a later layer has replaced.

    What stands on the command line counts as one layer, whatever its order.
    """
    typed = [layer.content for layer in layers if layer.is_typed]
    stages = [[layer.content] for layer in layers if not layer.is_typed] + [typed]
    for section in _sections_with_target():
        for key in _OF_TARGET:
            arguments = container.get(section, {}).get(key)
            for path in _stale(section, key, stages) if isinstance(arguments, dict) else ():
                _take_out(arguments, path.split("."))
    return container


def without_sizes_of_fresh_models(container: dict[str, Any], layers: Sequence[Layer]) -> dict[str, Any]:
    """``container`` without the model's arguments for which a pretrained folder has a file.

    These are the ones that stand beside ``model.config_file``, in the same layer, and that no later layer sets.
    """
    model = container.get("model", {})
    path, kwargs = model.get("pretrained"), model.get("kwargs")
    if not isinstance(path, str) or path.endswith(".safetensors") or not model.get("config_file"):
        return container
    given = [layer.content["model"] for layer in layers if isinstance(layer.content.get("model"), Mapping)]
    first = max((at for at, part in enumerate(given) if part.get("config_file")), default=-1)
    later = {path for part in given[first + 1 :] for path, _ in leaves("", part.get("kwargs") or {}) if path}
    for path, _ in leaves("", given[first].get("kwargs") or {}) if first >= 0 else ():
        if path not in later:
            _take_out(kwargs, path.split("."))
    return container


def sizes_of_folder(container: Mapping[str, Any], layers: Sequence[Layer]) -> Layer | None:
    """Rows as people train on, where a model is read from a folder and no data is named; None if nothing is known.

    They have as many tokens as the folder's model takes, and at most :data:`USUAL_LENGTH`; the option's own length is
    that of the smallest model, for which memory and time would be told that nobody meets. They have no tokens that the
    model does not know.
    """
    model, data = container.get("model", {}), container.get("data", {})
    kwargs, folder, file = data.get("kwargs"), model.get("pretrained"), model.get("config_file")
    is_default = data.get("name") == _OF_NO_DATA and isinstance(kwargs, dict)
    if not is_default or not isinstance(folder, str) or not file:
        return None
    longest, known = longest_of_folder(folder, file), _of_folder(folder, file, [_VOCABULARY])
    sizes = {
        _LENGTH: longest and min(longest, USUAL_LENGTH),
        _VOCABULARY: known and min(known, kwargs.get(_VOCABULARY, 0)),
    }
    named = {each for layer in layers if not _is_shipped(layer) for each, _ in leaves("", layer.content)}
    found = {key: size for key, size in sizes.items() if size and key in kwargs and f"data.kwargs.{key}" not in named}
    return Layer(str(Path(folder, file)), {"data": {"kwargs": found}}) if found else None


def _is_shipped(layer: Layer) -> bool:
    return not layer.is_typed and layer.source.startswith(SHIPPED)


def longest_of_folder(folder: str, file: str = "config.json") -> int | None:
    """The most tokens that the model of a pretrained folder takes, or None if its file does not say so."""
    return _of_folder(folder, file, _LENGTHS_OF_MODELS)


def _of_folder(folder: str, file: str, names: Sequence[str]) -> int | None:
    """The first of these numbers that stands in a folder's file and is positive."""
    try:
        content = json.loads(Path(folder, file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    given = [content.get(name) for name in names] if isinstance(content, dict) else []
    return next((most for most in given if isinstance(most, int) and most > 0), None)


def _sections_with_target() -> Iterator[str]:
    for name, annotation in get_type_hints(RunConfig).items():
        if is_dataclass(annotation) and {"target", "kwargs"} <= {field.name for field in fields(annotation)}:
            yield name


def _stale(section: str, key: str, stages: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Paths below ``section.key`` that were set only before the section's last change of its target."""
    target, first = None, 0
    found: list[set[str]] = []
    for at, contents in enumerate(stages):
        parts = [content[section] for content in contents if isinstance(content.get(section), Mapping)]
        found.append({path for part in parts for path, _ in leaves("", part.get(key) or {}) if path})
        for named in (part.get("target") for part in parts):
            if named not in _NOT_GIVEN:
                first = at if target is not None and named != target else first
                target = named
    kept = set().union(*found[first:])
    yield from sorted(set().union(*found[:first]) - kept)


def _take_out(arguments: dict[str, Any], path: Sequence[str]) -> None:
    *sections, last = path
    for section in sections:
        inner = arguments.get(section)
        if not isinstance(inner, dict):
            return
        arguments = inner
    if not isinstance(arguments.get(last), dict):
        arguments.pop(last, None)
