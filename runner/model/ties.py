"""Tied weights (one parameter used by several layers), and what layers must not share.

Each stage that uses a tied weight holds a copy. The copies stay equal because they start equal, receive the sum of all
copies' gradients, and are updated alike. In files a tied weight appears once, under its first name in the order of the
model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from runner.errors import Problem

__all__ = [
    "Layer",
    "Tie",
    "crossing_ties",
    "find_ties",
    "first_names",
    "sharing_problems",
    "tied_names",
    "tied_parameters",
    "tied_places",
    "with_all_names",
]


class Layer(Protocol):
    """The interface that a layer must have; see :class:`runner.model.layers.LayerSource`."""

    @property
    def index(self) -> int: ...

    @property
    def given(self) -> nn.Module | None: ...

    def full_name(self, local_name: str) -> str: ...


@dataclass(frozen=True)
class Tie:
    """One parameter with several names.

    Args:
        name: the first of the names.
        places: (index of the layer, global name), in the model's order.
    """

    name: str
    places: tuple[tuple[int, str], ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that use the weight, ascending, each once."""
        return tuple(sorted({layer for layer, _ in self.places}))

    def stages(self, partition: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """The stages that use the weight, ascending, each once."""
        found = (s for s, (first, last) in enumerate(partition) if any(first <= at <= last for at in self.layers))
        return tuple(found)


def find_ties(layers: Iterable[Layer]) -> tuple[Tie, ...]:
    """The parameters that have several names, in the order of their first name.

    Layers that are not built yet share nothing: see :func:`sharing_problems`.
    """
    places: dict[int, list[tuple[int, str]]] = {}
    for layer in layers:
        if layer.given is not None:
            for local_name, parameter in layer.given.named_parameters(remove_duplicate=False):
                places.setdefault(id(parameter), []).append((layer.index, layer.full_name(local_name)))
    found = (tuple(dict.fromkeys(each)) for each in places.values())
    return tuple(Tie(each[0][1], each) for each in found if len(each) > 1)


def tied_names(layers: Iterable[Layer]) -> list[tuple[str, ...]]:
    """All names of each parameter that :func:`find_ties` finds."""
    return [tuple(dict.fromkeys(name for _, name in tie.places)) for tie in find_ties(layers)]


def tied_parameters(layers: Iterable[Layer]) -> list[Tensor]:
    """The parameters that :func:`find_ties` finds."""
    listed = list(layers)
    places = tied_places(listed)
    return [
        parameter
        for layer in listed
        if layer.given is not None
        for name, parameter in layer.given.named_parameters(remove_duplicate=False)
        if (layer.index, layer.full_name(name)) in places
    ]


def tied_places(layers: Iterable[Layer]) -> set[tuple[int, str]]:
    """The places of all parameters that :func:`find_ties` finds: index of the layer, global name."""
    return {place for tie in find_ties(layers) for place in tie.places}


def crossing_ties(ties: Iterable[Tie], partition: Sequence[tuple[int, int]]) -> list[Tie]:
    """The weights that several stages use, where ``partition`` is the first and last layer of each stage."""
    return [tie for tie in ties if len(tie.stages(partition)) > 1]


def first_names(ties: Iterable[Tie]) -> dict[str, str]:
    """Every name of a tied weight to its first name."""
    return {name: tie.name for tie in ties for _, name in tie.places}


def with_all_names(state: Mapping[str, Tensor], ties: Iterable[Tie]) -> dict[str, Tensor]:
    """``state`` as the user's own ``load_state_dict`` expects it: a tied weight under each of its names."""
    names = {name: first for name, first in first_names(ties).items() if first in state}
    return dict(state) | {name: state[first] for name, first in names.items() if name not in state}


def sharing_problems(layers: Sequence[Layer], target: str) -> list[Problem]:
    """What layers share but stages cannot: memory behind two parameters, and buffers that a forward changes.

    In one process, two parameters over the same memory are updated one after the other; copies of it could not follow
    that.
    """
    owners: dict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
    problems = []
    for layer in layers:
        for local_name, parameter in layer.given.named_parameters() if layer.given is not None else ():
            others = owners[parameter.untyped_storage()._cdata]
            for key, (index, name) in others.items():
                if key != id(parameter) and index != layer.index:
                    rule = f"{name} and {layer.full_name(local_name)} are two parameters over one memory"
                    why = "Stages in different processes would have one each, and they would drift apart"
                    fix = "one nn.Parameter assigned in both places"
                    problems.append(Problem("model.target", target, rule, why, fix))
            others.setdefault(id(parameter), (layer.index, layer.full_name(local_name)))
    return problems + _shared_statistics(layers, target)


def _shared_statistics(layers: Sequence[Layer], target: str) -> list[Problem]:
    users: dict[int, set[int]] = defaultdict(set)
    names: dict[int, str] = {}
    for layer in layers:
        for path, module in layer.given.named_modules() if layer.given is not None else ():
            if getattr(module, "track_running_stats", False):
                users[id(module)].add(layer.index)
                names.setdefault(id(module), layer.full_name(path))
    return [
        Problem(
            "model.target",
            target,
            f"{names[key]} keeps running statistics and is used in layers {', '.join(map(str, sorted(found)))}",
            "Stages in different processes would each see a part of its batches",
            "parallelism.pipeline=1",
        )
        for key, found in users.items()
        if len(found) > 1
    ]
