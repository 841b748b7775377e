"""Models whose layers hand on values of many kinds, in plain PyTorch; every layer checks the types of what it gets."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset
from transformers.utils.generic import ModelOutput

WIDTH = 6


class Pair(NamedTuple):
    hidden: Tensor
    scale: float = 0.5


class Inner(NamedTuple):
    pair: Pair
    rest: Any


@dataclass
class State:
    hidden: Tensor
    count: int
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor
    mask: Tensor


@dataclass
class Output(ModelOutput):
    last_hidden_state: Tensor | None = None
    pooled: Tensor | None = None
    extra: tuple[Tensor, ...] | None = None


class Registered:
    def __init__(self, hidden: Tensor, factor: float) -> None:
        self.hidden, self.factor = hidden, factor


def remade(parts: Iterable[Any], factor: float) -> Registered:
    (hidden,) = parts
    return Registered(hidden, factor)


pytree.register_pytree_node(Registered, lambda value: ([value.hidden], value.factor), remade)


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Unknown:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class OwnTensor(Tensor):
    """A subclass of a tensor."""


Pack = Callable[["Layer", Tensor], Any]
Take = Callable[["Layer", Any], Tensor]


class Kind(NamedTuple):
    """How a layer packs its result, and how the next one takes it out.

    Args:
        refused: a word of the reason why it is refused; empty if it is carried.
    """

    pack: Pack
    take: Take
    refused: str = ""


def check(holds: bool) -> None:
    if not holds:
        raise TypeError("the value is not what the layer before has returned")


def of(made: type, take: Callable[[Any], Tensor], pack: Callable[[Tensor], Any]) -> Kind:
    """A kind that checks the type of what it takes."""

    def taken(layer: Layer, value: Any) -> Tensor:
        check(type(value) is made)
        return take(value)

    return Kind(lambda layer, hidden: pack(hidden), taken)


def in_tuple(pack: Callable[[Tensor], tuple[Any, ...]], take: Callable[..., Tensor]) -> Kind:
    return Kind(lambda layer, hidden: pack(hidden), lambda layer, value: take(*value))


def checked(result: Tensor, *conditions: bool) -> Tensor:
    check(all(conditions))
    return result


def shortened(hidden: Tensor) -> Any:
    """The rows with a positive first number alone, and where they were."""
    mask = hidden[:, 0] > 0
    return hidden[mask], mask


def lengthened(rows: Tensor, mask: Tensor) -> Tensor:
    full = rows.new_zeros(len(mask), rows.shape[1])
    full[mask] = rows
    return full


def nested_values(hidden: Tensor) -> Any:
    return {"a": [({"b": hidden * 2}, None, 3), (hidden[:, :2], "text")], "c": Inner(Pair(hidden), {"d": [True, 0.25]})}


def un_nested(value: Any) -> Tensor:
    (first, none, three), (view, text) = value["a"]
    inner = value["c"]
    check(none is None and three == 3 and text == "text" and type(inner) is Inner and type(inner.pair) is Pair)
    check(inner.rest == {"d": [True, 0.25]} and type(inner.rest["d"][0]) is bool)
    made: Tensor = first["b"] * inner.pair.scale + functional.pad(view, (0, WIDTH - 2)) + inner.pair.hidden
    return made


def strided(hidden: Tensor) -> Tensor:
    return torch.cat([hidden, hidden * 2], 1)[:, ::2]


def in_place(layer: Layer, value: Any) -> Tensor:
    hidden: Tensor = value[0]
    return hidden.add_(value[1])


def in_shared_memory(layer: Layer, value: Any) -> Tensor:
    hidden: Tensor = value[0]
    return hidden.mul_(0.5) + functional.pad(value[1], (0, WIDTH - 2))


def with_parameter(layer: Layer, hidden: Tensor) -> Any:
    return hidden, layer.linear.weight


def noise(layer: Layer, hidden: Tensor) -> Any:
    return hidden, torch.Generator().manual_seed(7).get_state()


def noised(layer: Layer, value: Any) -> Tensor:
    generator = torch.Generator()
    generator.set_state(value[1])
    hidden: Tensor = value[0]
    return hidden + torch.rand(WIDTH, generator=generator)


def fixed(word: str, pack: Callable[[Tensor], Any]) -> Kind:
    def take(layer: Layer, value: Any) -> Tensor:
        hidden: Tensor = value.hidden if isinstance(value, Unknown) else value[0]
        return hidden

    return Kind(lambda layer, hidden: pack(hidden), take, word)


def local_class(hidden: Tensor) -> Any:
    class Local(NamedTuple):
        hidden: Tensor

    return Local(hidden)


KINDS: dict[str, Kind] = {
    "tensor": of(Tensor, lambda v: v, lambda h: h),
    "tuple": of(tuple, lambda v: v[0] + v[1], lambda h: (h, h.sin())),
    "list": of(list, lambda v: v[0] + v[1], lambda h: [h, h.sin()]),
    "dict": of(dict, lambda v: v["a"] + v["b"], lambda h: {"b": h.cos(), "a": h}),
    "nested": of(dict, un_nested, nested_values),
    "named tuple": of(Pair, lambda v: v.hidden * v.scale, lambda h: Pair(h * 2, 0.25)),
    "dataclass": of(
        State, lambda v: checked(v.hidden * v.count, v.note is None), lambda h: State(hidden=h / 3, count=3)
    ),
    "frozen dataclass": of(Frozen, lambda v: v.hidden.masked_fill(v.mask, 0.5), lambda h: Frozen(h, h.detach() > 0.4)),
    "model output": of(
        Output,
        lambda v: checked(v.last_hidden_state + v["extra"][0] + v.extra[1], v.pooled is None, len(v) == 2),
        lambda h: Output(last_hidden_state=h, extra=(h.sin(), h.cos())),
    ),
    "registered class": of(Registered, lambda v: v.hidden * v.factor, lambda h: Registered(h, 1.25)),
    "ordered dict": of(OrderedDict, lambda v: list(v.values())[1], lambda h: OrderedDict(z=h.sin(), a=h)),
    "deque": of(deque, lambda v: checked(v[1], v.maxlen == 4), lambda h: deque([h.sin(), h], maxlen=4)),
    "list of named tuples": of(list, lambda v: v[0].hidden + v[1].hidden, lambda h: [Pair(h), Pair(h.sin())]),
    "none entries": in_tuple(lambda h: (None, h, None), lambda a, h, b: checked(h, a is None, b is None)),
    "plain values": in_tuple(
        lambda h: (3, h, 0.1, "text", True, -0.0, 10**20),
        lambda i, h, f, s, b, z, big: checked(
            h, i == 3, type(i) is int, f == 0.1, s == "text", b is True, math.copysign(1, z) < 0, big == 10**20
        ),
    ),
    "numbers that are none": in_tuple(
        lambda h: (h, math.nan, math.inf), lambda h, n, i: checked(h, n != n, i == math.inf)
    ),
    "the same twice": in_tuple(lambda h: (h, [h]), lambda h, v: checked(h * 2 + v[0], h is v[0])),
    "a tensor and its view": in_tuple(
        lambda h: (h, h[:, 1:3]), lambda h, v: h + functional.pad(v, (0, WIDTH - 2)).sin()
    ),
    "two views": in_tuple(lambda h: h.chunk(2, 1), lambda a, b: torch.cat([b, a], 1)),
    "whole numbers and truth": in_tuple(
        lambda h: (h, (h.detach() * 8).long(), h.detach() > 0),
        lambda h, n, b: checked(h + n.float() / 64, n.dtype is torch.int64, b.dtype is torch.bool),
    ),
    "small whole numbers": in_tuple(
        lambda h: (h, *((h.detach() * 8).abs().to(t) for t in (torch.uint8, torch.int8, torch.int16, torch.int32))),
        lambda h, *n: checked(
            h + sum(each.float() for each in n) / 64, n[0].dtype is torch.uint8, n[2].dtype is torch.int16
        ),
    ),
    "unsigned": in_tuple(
        lambda h: (h, torch.full((len(h), 2), 65535, dtype=torch.uint16)),
        lambda h, n: checked(h + n.float().mean() / 65535, n.dtype is torch.uint16),
    ),
    "no gradient": in_tuple(lambda h: (h, h.detach().sin()), lambda h, d: checked(h + d, not d.requires_grad)),
    "a constant": in_tuple(lambda h: (torch.ones(3, WIDTH), h), lambda c, h: h + c.sum(0)),
    "without axes": in_tuple(lambda h: (torch.tensor(0.5), h, h.new_ones(()) * 2), lambda a, h, b: h * a * b),
    "without elements": in_tuple(
        lambda h: (h, h[:, :0], h.new_empty(0, 3), h.new_empty(0, dtype=torch.int64)),
        lambda h, a, b, c: checked(h + a.sum(), a.shape[1:] == (0,), b.shape == (0, 3), c.dtype is torch.int64),
    ),
    "complex": in_tuple(lambda h: (torch.complex(h, h.sin()),), lambda z: checked(z.real + z.imag, z.is_complex())),
    "conjugated": in_tuple(lambda h: (torch.complex(h, h.sin()).conj(),), lambda z: z.real + 2 * z.imag),
    "negated": in_tuple(lambda h: (torch.complex(h, h.sin()).conj().imag, h), lambda n, h: n + 2 * h),
    "complex constant": in_tuple(
        lambda h: (h, torch.polar(torch.ones(WIDTH), torch.arange(float(WIDTH)))), lambda h, z: h * z.real + z.imag
    ),
    "transposed": in_tuple(lambda h: (h.t(),), lambda t: t.t()),
    "expanded": in_tuple(lambda h: (h.mean(1, keepdim=True).expand(-1, WIDTH), h), lambda e, h: e + h),
    "strided": in_tuple(lambda h: (strided(h),), lambda s: s),
    "other axes": in_tuple(
        lambda h: (h.view(-1, 2, 3).permute(2, 0, 1),), lambda p: p.permute(1, 2, 0).reshape(-1, WIDTH)
    ),
    "channels last": in_tuple(
        lambda h: (h.view(-1, 3, 1, 2).to(memory_format=torch.channels_last),), lambda c: c.reshape(-1, WIDTH)
    ),
    "float64": in_tuple(lambda h: (h.double(), h), lambda d, h: checked(d.float() + h, d.dtype is torch.float64)),
    "bfloat16": in_tuple(
        lambda h: (h.detach().bfloat16(), h), lambda d, h: checked(d.float() + h, d.dtype is torch.bfloat16)
    ),
    "float8": in_tuple(
        lambda h: (h.detach().to(torch.float8_e4m3fn), h),
        lambda d, h: checked(d.float() + h, d.dtype is torch.float8_e4m3fn),
    ),
    "changed in place": Kind(lambda layer, h: (h * 1.5, h.sin()), in_place),
    "state of a generator": Kind(noise, noised),
    "a parameter": Kind(with_parameter, lambda layer, value: value[0] @ value[1]),
    "shape": in_tuple(lambda h: (h, h.shape, h.shape[0]), lambda h, s, n: checked(h, type(s) is torch.Size, s[0] == n)),
    "slices": in_tuple(
        lambda h: (h, slice(1, None, 2), range(3)),
        lambda h, s, r: checked(h + h[:, s].sum(1, keepdim=True), s == slice(1, None, 2), r == range(3)),
    ),
    "members": in_tuple(
        lambda h: (h, Colour.BLUE, Level.HIGH),
        lambda h, c, n: checked(h * n, c is Colour.BLUE, type(n) is Level),
    ),
    "kinds of numbers": in_tuple(
        lambda h: (h, torch.float16, 1 + 2j, np.float64(0.5), np.int32(3), np.bool_(True)),
        lambda h, t, z, f, i, b: checked(
            h * float(f),
            t is torch.float16,
            z == 1 + 2j,
            type(f) is np.float64,
            type(i) is np.int32,
            type(b) is np.bool_,
        ),
    ),
    "results of torch": Kind(
        lambda layer, h: h.view(-1, 2, 3).max(1),
        lambda layer, v: checked(v.values.repeat(1, 2) + v.indices.repeat(1, 2), type(v) is torch.return_types.max),
    ),
    "numbers as keys": of(dict, lambda v: v[0] + v[1], lambda h: {0: h, 1: h.sin()}),
    "rows by values": Kind(lambda layer, h: shortened(h), lambda layer, v: lengthened(*v)),
    "a number by values": in_tuple(lambda h: (h, h.detach().mean().item()), lambda h, m: h + m),
    "a length by values": in_tuple(lambda h: (h, int((h.detach() > 0).sum())), lambda h, n: h + n / 100),
    "as many as values": in_tuple(
        lambda h: (h, [h[:, :1].detach()] * (1 + int(h.detach().sum() > 0))), lambda h, v: h + len(v)
    ),
    "unregistered object": fixed("Unknown", lambda h: Unknown(h)),
    "set": fixed("set", lambda h: (h, {1, 2})),
    "function": fixed("function", lambda h: (h, lambda x: x)),
    "module": fixed("Linear", lambda h: (h, nn.Linear(1, 1))),
    "generator": fixed("Generator", lambda h: (h, torch.Generator())),
    "device": fixed("device", lambda h: (h, h.device)),
    "array": fixed("ndarray", lambda h: (h, np.ones(2))),
    "sparse": fixed("sparse", lambda h: (h, torch.eye(3).to_sparse())),
    "own tensor": fixed("OwnTensor", lambda h: (h, torch.ones(2).as_subclass(OwnTensor))),
    "local class": fixed("Local", local_class),
    "changed in shared memory": Kind(
        lambda layer, h: ((made := h * 1.5), made[:, :2]), in_shared_memory, "same memory"
    ),
}
WHOLE = {"a number by values", "a length by values", "as many as values"}
"""Kinds in which a value depends on the whole batch, so that its micro-batches have other ones."""
CARRIED = [name for name, kind in KINDS.items() if not kind.refused]
REFUSED = [name for name, kind in KINDS.items() if kind.refused]


class Layer(nn.Module):
    """Takes a value, computes, and hands on another one.

    Args:
        takes: the kind that it takes, or None for a tensor; ``gives`` likewise.
    """

    def __init__(self, takes: str | None, gives: str | None, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)
        self.takes, self.gives = takes, gives

    def forward(self, value: Any) -> Any:
        hidden = value if self.takes is None else KINDS[self.takes].take(self, value)
        made = torch.tanh(self.linear(hidden))
        made = made * 0.5 + hidden if made.shape == hidden.shape else made
        return made if self.gives is None else KINDS[self.gives].pack(self, made)


def build(kinds: list[str], seed: int = 0) -> nn.Sequential:
    """As many layers as kinds and two more; between two of them passes a value of each kind."""
    torch.manual_seed(seed)
    takes = [None, *kinds]
    layers = [Layer(taken, given) for taken, given in zip(takes, [*kinds, None], strict=True)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def data(samples: int = 24, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (samples,), generator=generator))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)
