"""Finds what the forward of a layer changes on which its next forward depends, while its layers are profiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from runner.model.boundary import enter_graph, map_tensors
from runner.model.layers import LayerSource, draws_from_torch_alone
from runner.model.traced.module_structure import structure_of
from runner.model.walk import Walk
from runner.model.written import WrittenTensors
from runner.profile import ChangedState
from runner.profiling.backward_scan import as_leaf

__all__ = ["ChangedStates"]


class ChangedStates:
    """Runs each kind of layer two times more: what the second run still changes is no cache of the first.

    Buffers are left out, which a layer that runs again gets as they were. So are tensors that are only replaced, such
    as a loss that a layer leaves for others.

    Attributes:
        found: what was found.
    """

    def __init__(self) -> None:
        self.found: list[ChangedState] = []
        self._seen: set[Hashable] = set()

    def see(self, source: LayerSource, module: nn.Module, function: Callable[[Any], Any], value: Any) -> None:
        """Look for what a layer changes, on an input of it."""
        kind = structure_of(module)
        if kind in self._seen or draws_from_torch_alone(module):
            return
        self._seen.add(kind)
        with suppress(Exception):  # a forward may be possible once alone
            function(enter_graph(map_tensors(as_leaf, value)))
            walk = Walk([(source.name or source.label, module)], 0)
            written = WrittenTensors({key: tensor for key, (_, tensor) in walk.tensors.items()}, copying=False)
            with written:
                function(enter_graph(map_tensors(as_leaf, value)))
            self.found += _changes(module, walk, written)


def _changes(module: nn.Module, walk: Walk, written: WrittenTensors) -> list[ChangedState]:
    weights, buffers = ({id(each) for each in some} for some in (module.parameters(), module.buffers()))
    found = [
        ChangedState(_shown(name), key in weights, key in weights and tensor.requires_grad)
        for key, (name, tensor) in walk.tensors.items()
        if key in written.written and key not in buffers
    ]
    for part in walk.parts:
        gone = part.gone() if part.has_changed() else None
        if gone is None or part.name.endswith("._buffers"):
            continue
        tensors = [each for each in gone if isinstance(each, Tensor)]
        if gone and len(tensors) == len(gone) and not any(id(each) in written.read for each in tensors):
            continue
        found.append(ChangedState(_shown(part.changed_name()), weight=False, trained=False))
    return [*found, *(ChangedState(_shown(name), weight=False, trained=False) for name in walk.lost())]


def _shown(name: str) -> str:
    """A name as the model's own code has it."""
    return ".".join(part for part in name.split(".") if part not in {"_parameters", "_modules", "_buffers"})
