"""Weights that a request takes out of the training, ``trainer.freeze``.

A frozen weight has no gradient, no optimizer states and no messages between replicas. What lies before the first
trained weight has no backward.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from runner.errors import Problem
from runner.model.layers import LayerSource
from runner.model.ties import find_ties

__all__ = ["freeze_problems", "frozen"]

PATH = "trainer.freeze"


def frozen(sources: Sequence[LayerSource], patterns: Sequence[str]) -> list[LayerSource]:
    """The layers, of which the weights whose global names match a pattern need no gradients.

    A weight with several names is frozen by any of them. Modules that exist already are changed in place.

    Args:
        sources: the layers of the whole model.
        patterns: shell patterns of whole names, in which ``*`` also stands for dots.
    """
    if not patterns:
        return list(sources)
    return [_freezing(source, patterns, _frozen_by_ties(sources, patterns)) for source in sources]


def _frozen_by_ties(sources: Sequence[LayerSource], patterns: Sequence[str]) -> set[str]:
    """Every name of the weights that have several names, of which one matches."""
    ties = [{name for _, name in tie.places} for tie in find_ties(sources)]
    return {name for names in ties if any(_matches(each, patterns) for each in names) for name in names}


def _freezing(source: LayerSource, patterns: Sequence[str], tied: set[str]) -> LayerSource:
    def freeze(module: nn.Module) -> nn.Module:
        for name, parameter in module.named_parameters():
            full = source.full_name(name)
            if full in tied or _matches(full, patterns):
                parameter.requires_grad_(False)
        return module

    if source.given is not None:
        freeze(source.given)
        return source
    return replace(source, build=lambda: freeze(source.build()))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def freeze_problems(names: Sequence[str], patterns: Sequence[str]) -> Iterator[Problem]:
    """Patterns that match none of the model's weights.

    Args:
        names: the global names of all weights, each weight under all of its names.
        patterns: see :func:`frozen`.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            why = f"The nearest name is {near[0]}" if near else "The model has no weights"
            yield Problem(PATH, pattern, "must match names of weights", why, _parent(names, pattern))


def _parent(names: Sequence[str], pattern: str) -> str:
    """The override that freezes what lies below the pattern, if it is the name of a module."""
    below = pattern.rstrip(".*") + ".*"
    return f"'{PATH}=[{below}]'" if any(fnmatchcase(name, below) for name in names) else ""
