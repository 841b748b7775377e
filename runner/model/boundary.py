"""Values that pass between two layers: a tensor, or tuples, lists and dicts of tensors and plain values.

A value is flattened to a list of tensors and a JSON-able structure, so that it can cross a process border: tensors as
messages, the structure once in an announcement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Structure", "call_arguments", "enter_graph", "flatten", "map_tensors", "num_samples", "shapes", "unflatten"]

# JSON: {"tensor": i} | {"tuple": [...]} | {"list": [...]} | {"dict": [[k, …]]} | {"value": v}
Structure: TypeAlias = Any


def flatten(value: Any, keys: type | tuple[type, ...] = str) -> tuple[list[Tensor], Structure]:
    """Return the tensors of ``value`` in order, and the structure that puts them back.

    Args:
        keys: the types that keys of dictionaries may have, of those that JSON keeps in a list.

    Raises:
        TypeError: it contains something other than tensors, containers of tensors, or plain values (None, bool, int,
            float, str).
    """
    tensors: list[Tensor] = []
    try:
        return tensors, _flatten(value, tensors, keys)
    except TypeError as error:
        if hasattr(value, "logits"):
            hint = "a model of transformers must return its logits alone, model(ids, use_cache=False).logits"
            raise TypeError(f"{error}; {hint}") from error
        raise


def _flatten(value: Any, tensors: list[Tensor], keys: type | tuple[type, ...]) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple):
        return {"tuple": [_flatten(item, tensors, keys) for item in value]}
    if isinstance(value, list):
        return {"list": [_flatten(item, tensors, keys) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, keys) for key in value):
        return {"dict": [[key, _flatten(item, tensors, keys)] for key, item in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(
        f"a {type(value).__name__} cannot pass between layers: only tensors, tuples, lists, dicts with string keys, "
        "and plain values (None, bool, int, float, str) can"
    )


def unflatten(tensors: Sequence[Tensor], structure: Structure) -> Any:
    """The inverse of :func:`flatten`."""
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "tuple":
            return tuple(unflatten(tensors, item) for item in content)
        case "list":
            return [unflatten(tensors, item) for item in content]
        case "dict":
            return {key: unflatten(tensors, item) for key, item in content}
        case _:
            return content


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to each of its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        mapped = [map_tensors(function, item) for item in value]
        if isinstance(value, tuple):
            return type(value)(*mapped) if hasattr(value, "_fields") else tuple(mapped)
        return mapped
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


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
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _shapes(each)
    elif isinstance(value, dict):
        entries = {key: ", ".join(_shapes(each)) for key, each in value.items()}
        yield "{" + ", ".join(f"{key}: {said}" for key, said in entries.items() if said) + "}"


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
