"""Layers that remember: each kind changes something in its forward on which later forwards depend."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6
_forwards = 0
_seen: dict[str, list[float]] = {"means": []}


class Remembering(nn.Module):
    """A linear layer whose output is scaled by what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """Make what it remembers."""

    def factor(self, value: Tensor) -> Any:
        """The factor of this forward; what is remembered changes."""
        raise NotImplementedError

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = torch.tanh(self.linear(value)) * self.factor(value)
        return made


class Counts(Remembering):
    def prepare(self) -> None:
        self.calls = 0

    def factor(self, value: Tensor) -> float:
        self.calls += 1
        return 1 + 0.1 * (self.calls % 5)


class Lists(Remembering):
    def prepare(self) -> None:
        self.means: list[float] = []
        self.last = collections.deque([0.0], maxlen=3)

    def factor(self, value: Tensor) -> float:
        self.means.append(float(value.detach().mean()))
        self.last.append(self.means[-1])
        return 1 + len(self.means) / 10 + sum(self.last)


class Caches(Remembering):
    """Like the keys and values of earlier calls, in a dict of an object of its own."""

    def prepare(self) -> None:
        self.cache = SimpleNamespace(rows=collections.OrderedDict[str, Tensor](), hits=collections.Counter[str]())

    def factor(self, value: Tensor) -> Tensor:
        before = self.cache.rows.get("row", torch.zeros(1, WIDTH))
        self.cache.rows["row"] = torch.cat([before, value.detach().mean(0, keepdim=True)])[-4:]
        self.cache.hits["row"] += 1
        row: Tensor = self.cache.rows["row"]
        made: Tensor = 1 + row.mean() / self.cache.hits["row"]
        return made


class Draws(Remembering):
    """From generators of its own."""

    def prepare(self) -> None:
        self.python, self.numpy = random.Random(3), np.random.default_rng(4)
        self.legacy, self.torch = np.random.RandomState(5), torch.Generator().manual_seed(6)

    def factor(self, value: Tensor) -> float:
        drawn = float(torch.rand(1, generator=self.torch))
        return 1 + self.python.random() + float(self.numpy.random()) + float(self.legacy.rand()) + drawn


class Plain(Remembering):
    """A tensor and an array that are no buffers, changed in place, and a tensor that is replaced."""

    def prepare(self) -> None:
        self.total, self.norms, self.replaced = torch.zeros(WIDTH), np.zeros(2), torch.ones(())

    def factor(self, value: Tensor) -> Tensor:
        self.total.add_(value.detach().mean(0))
        self.norms += float(value.detach().norm())
        self.replaced = self.replaced * 0.9 + value.detach().mean()
        return 1 + self.total.mean() + float(self.norms.mean()) / 50 + self.replaced


class Closes(Remembering):
    """Over a variable, and over a default and an iterator."""

    def prepare(self) -> None:
        count, numbers = 0, itertools.count(1)

        def step(known: list[int] = []) -> float:  # noqa: B006  # it is what the test is about
            nonlocal count
            count += 1
            known.append(next(numbers))
            return 1 + count / 10 + len(known) / 20

        self.step = step

    def factor(self, value: Tensor) -> float:
        return float(self.step())


class Global(Remembering):
    """Variables of its module and its class."""

    made = 0

    def factor(self, value: Tensor) -> float:
        global _forwards
        _forwards += 1
        Global.made += 1
        _seen["means"].append(float(value.detach().mean()))
        return 1 + (_forwards + Global.made) / 20 + len(_seen["means"]) / 30


class Momentum(Remembering):
    """A frozen copy follows the weights."""

    def prepare(self) -> None:
        self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def factor(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.linear.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
            return torch.tanh(self.slow(value))


class Clips(Remembering):
    """Its own weight, and sets another to one of norm one, as a U-Net with weight standardization does."""

    def prepare(self) -> None:
        self.direction = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
            self.direction.data = functional.normalize(self.direction.data)
        made: Tensor = self.linear(value) @ self.direction
        return made


class Spectral(Remembering):
    """Power iterations in buffers, and a batch norm's statistics."""

    def prepare(self) -> None:
        nn.utils.parametrizations.spectral_norm(self.linear)
        self.norm = nn.BatchNorm1d(WIDTH)

    def factor(self, value: Tensor) -> Tensor:
        made: Tensor = self.norm(value)
        return made


class Replaces(Remembering):
    """Registers its buffer anew, and another one late."""

    mean: Tensor
    first: Tensor

    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def factor(self, value: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + value.detach().mean(0)
        if not hasattr(self, "first"):
            self.register_buffer("first", value.detach().mean(0), persistent=False)
        return 1 + self.mean + self.first


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Switches(Remembering):
    """A set, an object with slots, the gradient of a weight, and a module that is registered late."""

    def prepare(self) -> None:
        self.kinds, self.slotted = set[int](), Slotted()

    def factor(self, value: Tensor) -> float:
        self.slotted.calls += 1
        self.kinds.add(self.slotted.calls % 3)
        self.linear.bias.requires_grad_(self.slotted.calls % 4 != 3)
        if self.slotted.calls == 2:
            self.add_module("late", nn.Identity())
        return 1 + len(self.kinds) / 10 + len(self._modules) / 20


KINDS: dict[str, Callable[[], Remembering]] = {
    kind.__name__: kind
    for kind in (Counts, Lists, Caches, Draws, Plain, Closes, Global, Momentum, Clips, Spectral, Replaces, Switches)
}
WRITE_WEIGHTS = {"Momentum", "Clips", "Switches"}
ONE_PROCESS = {"Global"}
"""Kinds whose state is that of a process, so that threads are no ranks for them."""
IN_BUFFERS = {"Spectral"}
"""Kinds all of whose state is in buffers."""


class Streams(Remembering):
    """Takes numbers from a generator, which nobody can set back."""

    def prepare(self) -> None:
        self.numbers = self.count()

    @staticmethod
    def count() -> Iterator[int]:
        yield from iter(range(1, 1000))

    def factor(self, value: Tensor) -> float:
        return 1 + next(self.numbers) / 10


def forget() -> None:
    """Let the variables of this module be new ones."""
    global _forwards
    _forwards = Global.made = 0
    _seen["means"].clear()


def model(kinds: list[str], seed: int) -> nn.Sequential:
    """Layers of these kinds between two linear ones."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, WIDTH), *(KINDS[kind]() for kind in kinds), nn.Linear(WIDTH, 3))
