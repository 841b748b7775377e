"""Fills layers with pretrained weights when they are built, so that a rank reads what its own layers need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from runner.errors import Problem, RequestError
from runner.model.layers import LayerSource
from runner.model.pretrained.stored import PATH
from runner.model.pretrained.weights import PretrainedWeights
from runner.model.sharded.values import Shard
from runner.model.ties import find_ties

__all__ = ["all_names", "filled"]


Named = Callable[[str], "str | None"]
"""From a weight's name to its name for the files; None for a weight that no files have."""


def filled(
    sources: Sequence[LayerSource],
    weights: PretrainedWeights,
    named: Named = str,
    shards: Mapping[str, Shard] = MappingProxyType({}),
) -> list[LayerSource]:
    """The layers, which copy the weights into their modules when they are built.

    One tensor of the files is in memory at a time; a tensor that is made of several, these.

    Args:
        sources: the layers.
        weights: the files' weights.
        named: gives a weight's name for the files.
        shards: the parts of weights that the modules have, by the weight's name in the model; the others are whole.
    """
    ties = _names_of_ties(sources, named)

    def source(one: LayerSource) -> LayerSource:
        def build() -> nn.Module:
            module = one.build()
            full = {one.full_name(name): tensor for name, tensor in module.state_dict().items()}
            to_fill = {own: tensor for name, tensor in full.items() if (own := named(name)) is not None}
            cuts = {own: shards[name] for name in full if name in shards and (own := named(name)) is not None}
            _fill(to_fill, ties, weights, cuts)
            return module

        return replace(one, build=build)

    return [source(one) for one in sources]


def all_names(sources: Sequence[LayerSource], names: Iterable[str], named: Named = str) -> dict[str, tuple[str, ...]]:
    """All names of each tensor for the files, by the one of them that is given."""
    ties = _names_of_ties(sources, named)
    return {name: ties.get(name, (name,)) for name in names}


def _names_of_ties(sources: Sequence[LayerSource], named: Named) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for tie in find_ties(sources):
        names = tuple(dict.fromkeys(own for _, name in tie.places if (own := named(name)) is not None))
        found |= dict.fromkeys(names, names)
    return found


@torch.no_grad()
def _fill(
    own: Mapping[str, Tensor],
    ties: Mapping[str, tuple[str, ...]],
    weights: PretrainedWeights,
    shards: Mapping[str, Shard],
) -> None:
    wanted = {name: ties.get(name, (name,)) for name in own}
    weights.require(wanted)
    done: set[str] = set()
    for names in wanted.values():
        making = weights.making(names)
        if making is None or not done.isdisjoint(names):
            continue
        made = making.read()
        for target, value in made.items():
            for each in ties.get(target, (target,)):
                if each in own:
                    _copy(each, own[each], value, shards.get(each))
                    done.add(each)


def _copy(name: str, own: Tensor, value: Tensor, shard: Shard | None) -> None:
    if own.is_floating_point() != value.is_floating_point():
        rule = f"must hold {name} as {str(own.dtype).removeprefix('torch.')}"
        why = f"It is {str(value.dtype).removeprefix('torch.')} in the files: quantized weights are not trained"
        raise RequestError([Problem(PATH, value.dtype, rule, why)])
    wanted = tuple(own.shape) if shard is None else shard.whole
    if wanted != tuple(value.shape):
        rule = f"must hold {name} with the shape {wanted}"
        raise RequestError([Problem(PATH, tuple(value.shape), rule)])
    own.copy_(value if shard is None else shard.cut(value))
