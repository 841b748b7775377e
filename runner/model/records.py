"""Values of other types than Python's own containers, taken apart so that they can cross a process border by name.

A named tuple, a dataclass, a member of an enumeration, an output of transformers and whatever else torch's pytree
knows are made again of their parts by the class that has the same name in the other process, which runs the same code.
Only such classes are called, and no function that a message names.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["PLAIN", "NotCarriedError", "put_together", "take_apart", "why_not_plain"]

PLAIN = (NoneType, bool, int, float, str)
"""Types whose values are written as they are; those of classes that inherit from them would lose their class."""

_SLICES = {"slice": slice, "range": range}


class NotCarriedError(TypeError):
    """A value of this type has no parts of which another process could make it."""

    def __init__(self, value: Any, why: str = "") -> None:
        super().__init__(why)
        self.value, self.why = value, why


def take_apart(value: Any, *, by_name: bool) -> tuple[str, Any, list[Any]]:
    """``(kind, class, parts)``: how a value is made again, of which class, and of which parts.

    Args:
        by_name: whether the class is given by its name, for another process; else it is the class itself.

    Raises:
        NotCarriedError: it cannot be made again.
    """
    made = type(value)
    if isinstance(value, enum.Enum):
        if getattr(value, "name", None) not in made.__members__:
            raise NotCarriedError(value)
        return "member", _class_or_name(value, by_name), [value.name]
    if made is torch.Size:
        return "size", "", list(value)
    if made is torch.dtype:
        return "dtype", "", [str(value).removeprefix("torch.")]
    if made is slice or made is range:
        return made.__name__, "", [value.start, value.stop, value.step]
    if made is complex:
        return "complex", "", [value.real, value.imag]
    if isinstance(value, np.generic) and isinstance(value.item(), (*PLAIN, complex)):
        return "number", value.dtype.str, [value.item()]
    if made in pytree.SUPPORTED_NODES and made is not dict:
        parts, context = pytree.SUPPORTED_NODES[made].flatten_fn(value)
        return "node", _class_or_name(value, by_name), [context, *parts]
    if isinstance(value, tuple) and hasattr(made, "_fields") and not vars_of(value):
        return "named tuple", _class_or_name(value, by_name), list(value)
    if is_dataclass(value) and not isinstance(value, type | tuple | list | dict | Tensor | nn.Module):
        state = vars_of(value)
        return "dataclass", _class_or_name(value, by_name), [list(state), *state.values()]
    raise NotCarriedError(value)


def put_together(kind: str, of: Any, parts: Sequence[Any]) -> Any:
    """The inverse of :func:`take_apart`."""
    match kind:
        case "size":
            return torch.Size(parts)
        case "dtype":
            return getattr(torch, parts[0])
        case "slice" | "range":
            return _SLICES[kind](*parts)
        case "complex":
            return complex(*parts)
        case "number":
            return np.dtype(of).type(parts[0])
        case _:
            return _of_class(kind, of if isinstance(of, type) else _class_of(of), parts)


def _of_class(kind: str, made: Any, parts: Sequence[Any]) -> Any:
    if kind == "member" and issubclass(made, enum.Enum):
        return made[parts[0]]
    if kind == "node" and made in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[made].unflatten_fn(parts[1:], parts[0])
    if kind == "named tuple" and issubclass(made, tuple) and hasattr(made, "_fields"):
        return made._make(parts)
    if kind == "dataclass" and is_dataclass(made):
        value: Any = object.__new__(cast(type, made))
        for field, part in zip(parts[0], parts[1:], strict=True):
            object.__setattr__(value, field, part)
        return value
    raise TypeError(f"{made.__qualname__} is no {kind} in this process")


def vars_of(value: Any) -> dict[str, Any]:
    """The attributes of an object by name, those in slots first."""
    slots = [name for each in type(value).__mro__ for name in _slots_of(each) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})


def _slots_of(made: type) -> Sequence[str]:
    slots = made.__dict__.get("__slots__", ())
    return [name for name in ([slots] if isinstance(slots, str) else slots) if name not in ("__dict__", "__weakref__")]


def _class_or_name(value: Any, by_name: bool) -> Any:
    made = type(value)
    if not by_name:
        return made
    name = f"{made.__module__}:{made.__qualname__}"
    try:
        if _class_of(name) is made:
            return name
    except (ImportError, AttributeError):
        pass
    raise NotCarriedError(value, "its class is not found by its name: define it at the top level of a module")


def _class_of(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for step in path.split("."):
        found = getattr(found, step)
    return found


def why_not_plain(tensor: Tensor) -> str | None:
    """What a tensor is whose memory cannot be sent as it is; None for an ordinary one."""
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if wraps or not _is_torchs_own(type(tensor)):
        return "tensor of a class of its own"
    kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "MKL-DNN": tensor.is_mkldnn}
    found = next((f"{name} tensor" for name, is_it in kinds.items() if is_it), None)
    if found is None and tensor.layout is not torch.strided:
        return "sparse tensor"
    return found


def _is_torchs_own(made: type) -> bool:
    return made.__module__.partition(".")[0] == "torch" or made in (Tensor, nn.Parameter)
