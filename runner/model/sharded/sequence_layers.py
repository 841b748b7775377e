"""Lets ranks that divide a model's layers divide the values between these by tokens, too: ``parallelism.sequence``."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from runner.errors import Problem, RequestError
from runner.model.boundary import flatten, unflatten
from runner.model.buffers import BufferSnapshot
from runner.model.layers import LayerSource
from runner.model.precision import cast_module
from runner.model.seeds import seeded_with
from runner.model.sharded.operators import gather
from runner.model.sharded.plan import Division
from runner.model.sharded.sequence import Dims, Sequenced, sequenced
from runner.model.sharded.tokens import TokensError
from runner.model.traced.module_structure import form_of, structure_of
from runner.model.traced.operators import Program, trace
from runner.model.traced.segments import split

__all__ = ["sequenced_layers", "sequenced_programs"]

SEQUENCE = "parallelism.sequence"


def sequenced_programs(model: nn.Module, programs: dict[bool, Program], division: Division) -> dict[bool, Program]:
    """The programs of a whole model, whose layers are divided, with values between them divided by tokens if asked for.

    Args:
        model: the traced model.
        programs: its trace.
        division: the ranks; it is told what is divided by tokens.

    Raises:
        RequestError: tokens cannot be divided.
    """
    entries = (None,) * len(programs[True].inputs)
    return _sequenced(model, programs, division, entries, last=True, name="the model").programs


def sequenced_layers(
    sources: Sequence[LayerSource], inputs: Any, dtype: torch.dtype, target: str, division: Division
) -> list[LayerSource]:
    """The layers; each runs the operators of its trace for the rank's own tokens, where that can be.

    A layer that cannot be traced gets all tokens.

    Args:
        sources: the layers, divided by features when they are built.
        inputs: a small batch for the first one, in the format of the weights.
        dtype: this format.
        target: names the model in messages.
        division: the ranks; it is told what is divided by tokens.
    """
    chain = _Chain(sources, inputs, dtype, target, division)
    return [chain.source(place) for place in range(len(sources))]


@dataclass(frozen=True)
class _Border:
    """What a layer gets.

    Args:
        value: an example, whole.
        dims: the dimension along which a rank has a part of each of its tensors; None: it has the whole.
    """

    value: Any
    dims: Dims


class _Chain:
    """Builds layers, each with what is known of what those before it give."""

    def __init__(
        self, sources: Sequence[LayerSource], inputs: Any, dtype: torch.dtype, target: str, division: Division
    ) -> None:
        self._sources, self._dtype, self._target, self._division = list(sources), dtype, target, division
        self._borders = [_Border(inputs, (None,) * len(flatten(inputs)[0]))]
        self._made: dict[int, nn.Module] = {}  # of modules that exist already
        self._whole: set[int] = set()  # the layers that get all tokens
        self._known: dict[Hashable, Sequenced] = {}  # of layers that compute the same with other weights

    def source(self, place: int) -> LayerSource:
        """The layer at a place."""

        def around(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda value: run(self._gathered(place, value) if place in self._whole else value)

        return replace(self._sources[place], build=lambda: self._build_unwatched(place), around=around)

    def _build_unwatched(self, place: int) -> nn.Module:
        with _unwatched():
            return self.build(place)

    def build(self, place: int) -> nn.Module:
        """The module of a layer, and what is known of its result."""
        if place in self._made:
            return self._made[place]
        source, border = self._sources[place], self.border(place)
        module = cast_module(source.build(), self._dtype)
        made, exits = self._divided(module, place, border)
        if len(self._borders) == place + 1:
            value = _example(source, module, border.value)
            self._borders.append(_Border(value, exits or (None,) * len(flatten(value)[0])))
        if source.given is not None:
            self._made[place] = made
        return made

    def border(self, place: int) -> _Border:
        """What a layer gets; those before it are built for that if it is not known."""
        while len(self._borders) <= place:
            self.build(len(self._borders) - 1)
        return self._borders[place]

    def _divided(self, module: nn.Module, place: int, border: _Border) -> tuple[nn.Module, Dims]:
        """A layer that runs for the rank's own tokens, and how its results are divided; or the layer itself, and ()."""
        source, division = self._sources[place], self._division
        name = f"layer {source.index} ({type(module).__name__})"
        model, programs = division.programs.get(module, (module, None))
        last = source is self._sources[-1]
        key = structure_of(module), _form(border), last
        made = self._known.get(key)
        if made is None:
            try:
                programs = programs or trace(module, border.value, self._target)
            except RequestError:
                division.together.append(f"{name} has all of them: it cannot be traced")
                self._whole.add(place)
                return module, ()
            made = _sequenced(model, programs, division, border.dims, last=last, name=name)
            self._known[key] = made
        ((_, segment),) = split(model, made.programs, [])
        return segment, made.exits

    def _gathered(self, place: int, value: Any) -> Any:
        """What a layer gets, with all tokens."""
        tensors, nesting = flatten(value)
        group = self._division.group.name
        pairs = zip(tensors, self.border(place).dims, strict=True)
        return unflatten([each if dim is None else gather(each, dim, group) for each, dim in pairs], nesting)


def _form(border: _Border) -> Hashable:
    tensors, nesting = flatten(border.value)
    return json.dumps(nesting), tuple(map(form_of, tensors)), border.dims


@contextmanager
def _unwatched() -> Iterator[None]:
    """The block, unseen by what counts the memory of a profile: a trace allocates much, and makes sizes of symbols."""
    with ExitStack() as stack:
        while (mode := _get_current_dispatch_mode()) is not None and not isinstance(mode, FakeTensorMode):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _example(source: LayerSource, module: nn.Module, value: Any) -> Any:
    """What a layer returns for an example; nothing of it is changed."""
    before = BufferSnapshot(module.modules())
    try:
        with torch.no_grad(), seeded_with(0):
            return source.calling(module)(value)
    finally:
        before.put_back()


def _sequenced(
    model: nn.Module, programs: dict[bool, Program], division: Division, entries: Dims, *, last: bool, name: str
) -> Sequenced:
    """One program after another; what is divided in it is noted.

    Raises:
        RequestError: tokens cannot be divided.
    """
    options = {"divides": division.sequence, "apart": division.divides}
    try:
        made = sequenced(model, programs, division.group, entries, last=last, **options)
    except TokensError as error:
        rule = f"must divide the tokens of {name}"
        raise RequestError([Problem(SEQUENCE, division.sequence, rule, str(error), f"{SEQUENCE}=false")]) from error
    division.divides_tokens |= made.divides
    division.together += made.reasons
    return made
