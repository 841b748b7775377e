"""Models that must be traced, and do what a trace of their forward's operators leaves out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.errors import RequestError
from runner.model.fake import fake_tensors
from runner.model.traced.operators import trace

WIDTH = 6


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


reverse = Reversed.apply  # as code for domain adaptation has it


class Cubed(torch.autograd.Function):
    """Writes out its derivative, and takes no context in its forward."""

    @staticmethod
    def forward(value: Tensor, factor: float) -> Tensor:
        return factor * value**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        value, ctx.factor = inputs
        ctx.save_for_backward(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (value,) = ctx.saved_tensors
        return 3 * ctx.factor * value.square() * gradient, None


class Clipped(Cubed):
    """Has the derivative of its forward for all but large gradients."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Cubed.backward(ctx, gradient.clamp(-100, 100))


class Forgetful(Cubed):
    """Has the derivative of its forward for all but the first call of a model, which has another factor."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.factor = 0.5
        return Cubed.backward(ctx, gradient)


def applied(function: type[Cubed], *factors: float) -> Callable[[Whole, Tensor], Tensor]:
    def between(_: Whole, x: Tensor) -> Tensor:
        for factor in factors:
            x = torch.tanh(function.apply(x, factor))  # type: ignore[no-untyped-call, unused-ignore]
        return x

    return between


class Whole(nn.Module):
    """A model without layers, between whose halves something happens."""

    def __init__(self, between: Callable[[Whole, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), between

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.between(self, torch.tanh(self.first(x))))
        return made


def hooked(_: Whole, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]  # torch's own
    return x


def frozen_once(model: Whole, x: Tensor, *, by_method: bool) -> Tensor:
    for needed in (False, True):
        if by_method:
            model.second.requires_grad_(needed)
        else:
            model.second.weight.requires_grad = needed
        x = x if needed else x + torch.tanh(model.second(x))
    return x


def with_module_hook() -> Whole:
    made = Whole(lambda _, x: x)
    made.second.register_full_backward_hook(lambda module, given, coming: None)
    return made


REFUSED: dict[str, tuple[Callable[[], Whole], str]] = {
    "function": (lambda: Whole(lambda _, x: reverse(x)), "uses Reversed, a torch.autograd.Function"),  # type: ignore[no-untyped-call, unused-ignore]
    "clipped": (lambda: Whole(applied(Clipped, 0.5)), "uses Clipped, a torch.autograd.Function"),
    "one of two calls": (lambda: Whole(applied(Forgetful, 2.0, 0.5)), "uses Forgetful, a torch.autograd.Function"),
    "re-entrant checkpoint": (
        lambda: Whole(lambda _, x: checkpoint(torch.tanh, x, use_reentrant=True)),
        "uses CheckpointFunction",
    ),
    "hook on a tensor": (lambda: Whole(hooked), "puts a hook on a tensor"),
    "hook of a module": (with_module_hook, "has a module with backward hooks"),
    "weight frozen once": (lambda: Whole(partial(frozen_once, by_method=True)), "sets requires_grad of a weight"),
    "attribute set": (lambda: Whole(partial(frozen_once, by_method=False)), "sets requires_grad of a weight"),
}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused(kind: str, fake: bool) -> None:
    make, said = REFUSED[kind]
    if not fake:
        with pytest.raises(
            RequestError, match=f"must leave the backward to autograd where it is traced. Its forward {said}"
        ):
            trace(make(), torch.randn(3, 4), kind)
        return
    with fake_tensors(), pytest.raises(RequestError, match=said):
        trace(make(), torch.randn(3, 4), kind)


def test_a_compiled_model_is_refused_with_the_way_and_not_compiled() -> None:
    wrapped, in_place = Whole(lambda _, x: x), Whole(lambda _, x: x)
    in_place.second.compile()
    models: list[Any] = [torch.compile(wrapped), in_place]
    for model in models:
        with pytest.raises(RequestError, match=r"must not be compiled.* Try compile=true and a function"):
            trace(model, torch.randn(3, 4), "mine:build")


def test_a_compiled_function_is_refused_in_the_same_way() -> None:
    compiled = torch.compile(torch.sin, backend="aot_eager")
    with pytest.raises(RequestError, match=r"must not be compiled by torch\.compile where it is traced"):
        trace(Whole(lambda _, x: compiled(x)), torch.randn(3, 4), "mine:build")


def noise(generator: Any) -> Tensor:
    return torch.from_numpy(generator.standard_normal(WIDTH).astype(np.float32))


class Drawing(Whole):
    """Has generators and a counter of its own."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(between)
        self.python, self.numpy, self.calls = random.Random(3), np.random.default_rng(3), 0
        self.kept: Tensor | None = None


def counted(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return torch.div(x, model.calls)


def more(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    for _ in range(model.calls):
        x = torch.tanh(x)
    return x


GENERATOR = np.random.default_rng(3)
DRAWN: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "layer left out": (lambda _, x: x * 2 if random.random() < 0.5 else x, "draws from Python's random"),
    "noise": (lambda _, x: x + noise(np.random), "draws from NumPy's generator"),
    "generator of the model": (lambda m, x: x + noise(m.numpy), "draws from numpy, a generator that is not torch's"),
    "layer left out by its own": (lambda m, x: x * 2 if m.python.random() < 0.5 else x, "draws from python, a gen"),
    "generator of the module": (lambda _, x: x + noise(GENERATOR), "GENERATOR, a generator that is not torch's"),
    "new generator": (
        lambda _, x: x + noise(np.random.default_rng()),
        "(gives add|makes a tensor of) other numbers each time",
    ),
    "system": (lambda _, x: x * random.SystemRandom().random(), "gives mul other numbers each time"),
    "time": (lambda _, x: x * time.perf_counter(), "gives mul other numbers each time"),
    "counter": (counted, "gives div other numbers each time"),
    "more and more": (more, "calls other operators each time"),
}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("kind", DRAWN)
def test_what_differs_each_time_is_refused(kind: str, fake: bool) -> None:
    between, said = DRAWN[kind]
    before = random.getstate()
    with fake_tensors() if fake else nullcontext(), pytest.raises(RequestError, match=f"compute alike.*{said}"):
        trace(Drawing(between), torch.randn(3, 4), kind)
    assert fake or random.getstate() == before


def cached(model: Any, x: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.arange(WIDTH) / 3
    return torch.add(x, model.kept)


def told(model: Any, x: Tensor) -> Tensor:
    model.calls += 1  # for its own log
    return x * float(np.float64(2)) + torch.from_numpy(np.linspace(0, 1, WIDTH, dtype=np.float32))


def detached(_: Whole, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate + (torch.sign(x) - x).detach()


TRACED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "detached": detached,
    "checkpoint": lambda _, x: checkpoint(torch.tanh, x, use_reentrant=False),
    "nothing": lambda _, x: x,
    "derivative written out": applied(Cubed, 0.5, 2.0),
    "cached at the first call": cached,
    "counted and not used": told,
    "noise of torch": lambda _, x: x + torch.randn_like(x),
}


@pytest.mark.parametrize("kind", TRACED)
def test_what_a_trace_holds_is_traced(kind: str) -> None:
    """And the model, which runs for this, has the state and the random numbers that it had."""
    model = Drawing(TRACED[kind])
    before, state = torch.get_rng_state(), {name: weight.clone() for name, weight in model.state_dict().items()}
    assert set(trace(model, torch.randn(3, 4, generator=torch.Generator()), kind)) == {True, False}
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
