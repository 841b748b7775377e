"""Weights that a model ties and of which its files hold several that differ.

``transformers`` keeps each of them, whatever the configuration says of ties. A model that can do so has a method
``untie(name)``, which gives the weight of this name a parameter of its own; for another model, the files are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from runner.config.schema import ModelConfig
from runner.errors import Problem, RequestError
from runner.model.pretrained.stored import PATH
from runner.model.pretrained.weights import PretrainedWeights

__all__ = ["differing_in_files", "differing_problems", "untie", "untie_as"]


def untie(made: Any, groups: Sequence[Sequence[str]], config: ModelConfig) -> None:
    """Give weights of their own to those of a model that are tied there and differ in ``model.pretrained``.

    Args:
        made: what the model function returned, with a method ``untie``.
        groups: the names of each tied weight.
        config: names the files; if they are not there, or are not good, it is told where they are read.
    """
    if not groups:
        return
    with suppress(RequestError):
        weights = PretrainedWeights(config, made)
        for name in [each for names in groups for each in differing_in_files(names, weights)]:
            made.untie(name)


def untie_as(made: Any, groups: Iterable[Sequence[str]], state: Mapping[str, Tensor]) -> None:
    """The same, for weights that a checkpoint holds; a model without a method ``untie`` stays as it is."""
    for names in groups if callable(getattr(made, "untie", None)) else ():
        held = [name for name in names if name in state]
        for name in held[1:]:
            if not torch.equal(state[held[0]], state[name]):
                made.untie(name)


def differing_in_files(names: Sequence[str], weights: PretrainedWeights) -> list[str]:
    """Those of a tied weight's names whose tensors differ from that of the first name which the files have."""
    held = [name for name in names if weights.making([name]) is not None]
    with unset_fake_temporarily():
        return [name for name in held[1:] if not _equal(held[0], name, weights)]


def _equal(first: str, second: str, weights: PretrainedWeights) -> bool:
    one, other = weights.making([first]), weights.making([second])
    assert one is not None
    assert other is not None
    if tuple(one.shapes[first]) != tuple(other.shapes[second]):
        return False
    return torch.equal(one.read()[first], other.read()[second])


def differing_problems(wanted: Mapping[str, Sequence[str]], weights: PretrainedWeights) -> Iterator[Problem]:
    """A problem for every tensor that the model ties and the files hold several times with other values.

    Args:
        wanted: all names of each tensor, by the first.
        weights: the files.
    """
    for name, names in wanted.items():
        for other in differing_in_files(names, weights) if len(names) > 1 else ():
            rule, why = f"must hold one tensor for {name} and {other}", "The model ties them, and theirs differ"
            fix = f"model.pretrained_names=FILE with the line {other}: null"
            yield Problem(PATH, weights.path, rule, why, fix)
