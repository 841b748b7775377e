"""What a request's ``model.pretrained`` holds for its model: which tensors are there, missing, unexpected or wrong.

A model may have a method ``tensors_from(names)``, which says how its tensors are made of those that files hold under
these names: a list of (names, a function from these tensors to the model's, by name). Without it, tensors have the
same names in files and in the model. It may have ``may_be_absent(name)``: whether a buffer that it makes itself may be
missing in files.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from runner.config.schema import ModelConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.model.pretrained.files import stored_tensors
from runner.model.pretrained.names import read_name_map, renamed
from runner.model.pretrained.stored import PATH, StoredTensor

__all__ = ["Making", "PretrainedWeights"]

_MOST_LINES = 20
_LIKE = 0.6  # share of letters that two names must have in common to be called near

Make = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Making:
    """How some tensors of a model are made.

    Args:
        sources: the tensors of files that they are made of.
        make: the function that makes them, from tensors by the names that they have for the model's own reading.
        shapes: the shape of each tensor that it makes, by the model's name.
    """

    sources: Mapping[str, StoredTensor]
    make: Make
    shapes: Mapping[str, tuple[int, ...]]

    def read(self) -> Mapping[str, Tensor]:
        """The tensors, from memory maps of their files."""
        return self.make({name: stored.read() for name, stored in self.sources.items()})


class PretrainedWeights:
    """The tensors of a model that ``model.pretrained`` holds; reading headers alone.

    Args:
        config: names the files.
        model: what the model function returned; see the module's text.

    Raises:
        RequestError: the files are missing or wrong.
    """

    def __init__(self, config: ModelConfig, model: Any = None) -> None:
        assert config.pretrained is not None
        self.path = config.pretrained
        self._strict = config.pretrained_strict
        self.may_be_absent = getattr(model, "may_be_absent", lambda name: False)
        stored = _named(stored_tensors(config.pretrained), config)
        tensors_from = getattr(model, "tensors_from", _as_they_are)
        self._makings: dict[str, Making] = {}
        for making in _makings(stored, tensors_from):
            self._makings |= dict.fromkeys(making.shapes, making)

    def making(self, names: Sequence[str]) -> Making | None:
        """How the tensor that has these names in the model is made; None if the files do not have it."""
        return next((self._makings[name] for name in names if name in self._makings), None)

    def fresh(self, wanted: Mapping[str, Sequence[str]]) -> list[str]:
        """The tensors of the model that the files do not have.

        Args:
            wanted: all names of each tensor, by the first.
        """
        return [name for name, names in wanted.items() if self.making(names) is None and not self.may_be_absent(name)]

    def problems(self, shapes: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[str]]) -> list[Problem]:
        """What does not fit, a line for each tensor: wrong shapes always, missing and unexpected names if strict.

        Args:
            shapes: the shape of each tensor of the whole model, by its first name.
            wanted: all names of each tensor, by the first.
        """
        wrong = list(self._wrong_shapes(shapes, wanted))
        if not self._strict:
            return _first(wrong, len(wrong), self.path)
        count = len(wrong) + len(self.fresh(wanted)) + len(self._unused(wanted))
        return _first(chain(wrong, self._missing(wanted), self._unexpected(wanted)), count, self.path)

    def require(self, wanted: Mapping[str, Sequence[str]]) -> None:
        """Refuse missing tensors among some of the model's, if strict.

        Raises:
            RequestError: a tensor is missing.
        """
        if self._strict:
            raise_problems(self._missing(wanted))

    def _wrong_shapes(
        self, shapes: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[str]]
    ) -> Iterator[Problem]:
        for name, names in wanted.items():
            making = self.making(names)
            shape = next((making.shapes[each] for each in names if each in making.shapes), None) if making else None
            if shape is not None and tuple(shape) != tuple(shapes[name]):
                why = f"It is {shape} in the files"
                rule = f"must hold {name} with the shape {tuple(shapes[name])}"
                fix = f"model.pretrained_names=FILE with the line {name}: null, and model.pretrained_strict=false"
                yield Problem(PATH, self.path, rule, why, fix)

    def _missing(self, wanted: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
        spare = self._unused(wanted)
        for name in self.fresh(wanted):
            why = f"The nearest unused name is {near}" if (near := _nearest(name, spare)) else ""
            yield Problem(PATH, self.path, f"must hold {name}", why, "model.pretrained_strict=false")

    def _unexpected(self, wanted: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
        missing = self.fresh(wanted)
        for name in self._unused(wanted):
            near = _nearest(name, missing)
            why = f"The nearest missing name is {near}" if near is not None else "The model has no such tensor"
            yield Problem(PATH, self.path, f"must not hold {name}", why, "model.pretrained_strict=false")

    def _unused(self, wanted: Mapping[str, Sequence[str]]) -> list[str]:
        used = {name for names in wanted.values() for name in names}
        return [name for name in self._makings if name not in used]


def _first(problems: Iterable[Problem], count: int, path: str) -> list[Problem]:
    """The first problems, and a last one that counts the others. Nearest names of the others are not looked for."""
    more = count - _MOST_LINES
    last = [Problem(PATH, path, f"and {more} more tensors do not fit")] if more > 0 else []
    return [*islice(problems, _MOST_LINES), *last]


def _nearest(name: str, known: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_LIKE)), None)


def _named(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors by their names for the model, after ``model.pretrained_names``."""
    if config.pretrained_names is None:
        return dict(stored)
    names = read_name_map(config.pretrained_names)
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = renamed(name, names)
        if own is not None and own in found:
            rule, why = "must give each tensor a name of its own", f"{found[own].name} and {name} are both {own}"
            raise RequestError([Problem("model.pretrained_names", config.pretrained_names, rule, why)])
        if own is not None:
            found[own] = tensor
    return found


def _as_they_are(names: Sequence[str]) -> list[tuple[tuple[str, ...], Make]]:
    return [((name,), dict) for name in names]


def _makings(
    stored: Mapping[str, StoredTensor], tensors_from: Callable[[Sequence[str]], Sequence[tuple[Sequence[str], Make]]]
) -> Iterator[Making]:
    for names, make in tensors_from(list(stored)):
        sources = {name: stored[name] for name in names}
        shaped = make({name: torch.empty(tensor.shape, device="meta") for name, tensor in sources.items()})
        yield Making(sources, make, {name: tuple(tensor.shape) for name, tensor in shaped.items()})
