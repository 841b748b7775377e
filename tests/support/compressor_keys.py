"""A compressor's section of a request with values of its keys, each where a request gives it."""

from __future__ import annotations

from typing import Any

from runner.config.schema import CompressionConfig
from runner.optim.catalogue.compression import CompressionKind

__all__ = ["examples_of", "section_with"]


def examples_of(kind: CompressionKind) -> dict[str, Any]:
    """The first legal value of each key that has examples."""
    return {key: values[0] for key, values in kind.examples.items()}


def section_with(kind: CompressionKind, **keys: Any) -> CompressionConfig:
    """The section of a request for this compressor.

    Args:
        kind: the compressor.
        keys: values of keys of the section, and of the compressor's own.
    """
    section = CompressionConfig(name=kind.name)
    for key, value in keys.items():
        if kind.place_of(key) == key:
            setattr(section, key, value)
        else:
            section.kwargs[key] = value
    return section
