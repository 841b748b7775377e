"""Values that pass between two layers: a tensor, or tensors and plain values in containers of many types.

A value is flattened to a list of tensors and a JSON-able structure, so that it can cross a process border: tensors as
messages, the structure once in an announcement. A tensor that is in a value twice is listed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from runner.model.records import PLAIN, NotCarriedError, put_together, take_apart, why_not_plain

__all__ = [
    "CannotPassError",
    "Structure",
    "call_arguments",
    "enter_graph",
    "flatten",
    "map_tensors",
    "num_samples",
    "shapes",
    "unflatten",
]

# JSON: {"tensor": i} | {"tuple": […]} | {"list": […]} | {"dict": [[key, …]]} | {"value": v} | {"made": [kind, …]}
Structure: TypeAlias = Any


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Return the tensors of ``value`` in order, each once, and the structure that puts them back.

    Raises:
        CannotPassError: it contains something that another process could not make again.
    """
    taken = _Taken()
    try:
        return taken.tensors, taken.apart(value)
    except NotCarriedError as error:
        raise CannotPassError(error) from None


class CannotPassError(TypeError):
    """A value contains something that another process could not make again."""

    def __init__(self, error: NotCarriedError) -> None:
        name = type(error.value).__name__
        can = (
            "only tensors, plain values (None, bool, int, float, str), and tuples, lists, dicts, named tuples and "
            "dataclasses of them can"
        )
        article = "an" if name[0] in "aeiouAEIOU" else "a"
        super().__init__(f"{article} {name} cannot pass between layers: {error.why or can}")


class _Taken:
    """Takes one value apart.

    Args:
        opaque: a list to which values are added that have no parts; None: the value is for another process, which could
            not make them, nor objects of classes that it does not find.

    Attributes:
        tensors: the tensors that were found.
    """

    def __init__(self, opaque: list[Any] | None = None) -> None:
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._opaque = opaque

    def apart(self, value: Any) -> Structure:
        """The structure of a value, whose tensors are added to those found."""
        made = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if made in PLAIN:
            return {"value": value}
        if made is tuple or made is list:
            return {made.__name__: [self.apart(item) for item in value]}
        if made is dict and all(type(key) in PLAIN for key in value):
            return {"dict": [[key, self.apart(item)] for key, item in value.items()]}
        try:
            kind, of, parts = take_apart(value, by_name=self._opaque is None)
        except NotCarriedError:
            if self._opaque is None:
                raise
            self._opaque.append(value)
            return {"opaque": len(self._opaque) - 1}
        return {"made": [kind, of, [self.apart(part) for part in parts]]}

    def _tensor(self, tensor: Tensor) -> Structure:
        odd = why_not_plain(tensor) if self._opaque is None else None
        if odd is not None:
            raise NotCarriedError(tensor, f"it is a {odd}, and messages have plain memory")
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        return {"tensor": place}


def unflatten(tensors: Sequence[Tensor], structure: Structure, opaque: Sequence[Any] = ()) -> Any:
    """The inverse of :func:`flatten`."""
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "value":
            return content
        case "tuple":
            return tuple([unflatten(tensors, item, opaque) for item in content])
        case "list":
            return [unflatten(tensors, item, opaque) for item in content]
        case "dict":
            return {key: unflatten(tensors, item, opaque) for key, item in content}
        case "opaque":
            return opaque[content]
        case _:
            how, of, parts = content
            return put_together(how, of, [unflatten(tensors, part, opaque) for part in parts])


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to each of its tensors, once to each; what it cannot look into stays."""
    if isinstance(value, Tensor):
        return function(value)
    opaque: list[Any] = []
    taken = _Taken(opaque)
    structure = taken.apart(value)
    return unflatten([function(tensor) for tensor in taken.tensors], structure, opaque) if taken.tensors else value


def num_samples(value: Any) -> int:
    """The length of the first axis of the first tensor."""
    tensors, _ = flatten(value)
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 1


def shapes(value: Any) -> str:
    """The shapes and dtypes of ``value``'s tensors, those of a dict with its keys; or its type, for error messages."""
    try:
        tensors, _ = flatten(value)
    except TypeError:
        tensors = []
    return ", ".join(_shapes(value)) if tensors else type(value).__name__


def _shapes(value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    elif isinstance(value, dict):
        entries = {key: ", ".join(_shapes(each)) for key, each in value.items()}
        yield "{" + ", ".join(f"{key}: {said}" for key, said in entries.items() if said) + "}"
    elif type(value) not in PLAIN:
        for each in value if isinstance(value, tuple | list) else _parts_of(value):
            yield from _shapes(each)


def _parts_of(value: Any) -> list[Any]:
    try:
        return take_apart(value, by_name=False)[2]
    except NotCarriedError:
        return []


def call_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch's input as arguments of a model: a tuple or list is positional, a dict is keywords."""
    if isinstance(value, dict):
        return (), value
    return (tuple(value), {}) if isinstance(value, tuple | list) else ((value,), {})


def enter_graph(value: Any) -> Any:
    """Turn the leaf tensors of a boundary into inputs that a layer may change in place.

    Autograd refuses in-place operations (``nn.ReLU(inplace=True)``) on leaves. In an uncut model the layer's input is
    not a leaf. The returned tensors share the leaves' memory and pass their gradients on to them.
    """
    return map_tensors(_entered, value)


def _entered(tensor: Tensor) -> Tensor:
    """A tensor of the same shape that autograd does not treat as a view of the leaf; made without a Python function."""
    if not tensor.requires_grad:
        return tensor
    entered: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return entered
