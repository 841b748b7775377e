"""Layers whose backward is not linear in the gradient, or that give something else when they are run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_profiles import layer as row
from plan_profiles import model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.memory.solve.values import ActivationPlan, Segment
from runner.plan.in_place import in_place_problems
from runner.profile import BoundaryTensor
from runner.profiling.contracts import is_torchs_own, repeats

WIDTH = 5
Change = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, forward: Callable[[Layer, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.run, self.calls = nn.Linear(WIDTH, WIDTH), forward, 0
        self.generator = torch.Generator()

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value)) if self.run is None else self.run(self, value)


def on_output(change: Change) -> Layer:
    def forward(layer: Layer, value: Tensor) -> Tensor:
        made = torch.tanh(layer.linear(value))
        if made.requires_grad:
            made.register_hook(change)  # type: ignore[no-untyped-call]  # torch's own
        return made

    return Layer(forward)


def on_weights(change: Change) -> Layer:
    layer = Layer()
    for weight in layer.parameters():
        weight.register_hook(change)  # type: ignore[no-untyped-call]
    return layer


def of_module(change: Change) -> Layer:
    layer = Layer()
    layer.register_full_backward_hook(lambda module, of_input, of_output: tuple(map(change, of_input)))
    return layer


def own_function(change: Change) -> Layer:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return change(gradient)

    def forward(layer: Layer, value: Tensor) -> Tensor:
        made: Tensor = Function.apply(torch.tanh(layer.linear(value)))  # type: ignore[no-untyped-call, unused-ignore]
        return made

    return Layer(forward)


def tried(layer: nn.Module, *, dtype: torch.dtype = torch.float32) -> bool:
    value = torch.randn(4, WIDTH, dtype=dtype, requires_grad=True)
    layer.to(dtype)
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    assert not is_torchs_own(layer)
    found = repeats(3, layer, value, layer, narrow=dtype is torch.float16)
    assert all(torch.equal(weight, before[name]) for name, weight in layer.state_dict().items())
    assert all(weight.grad is None for weight in layer.parameters())
    assert value.grad is None
    return found


NONLINEAR: dict[str, Change] = {
    "clamped": lambda gradient: gradient.clamp(-1, 1),
    "clamped far away": lambda gradient: gradient.clamp(-100, 100),
    "normalised": lambda gradient: gradient / (gradient.norm() + 1e-6),
    "signs": torch.sign,
    "shifted": lambda gradient: gradient + 0.1,
    "decayed": lambda gradient: gradient + 0.01 * torch.ones_like(gradient),
    "rounded": torch.round,
    "small ones dropped": lambda gradient: gradient * (gradient.abs() > 1e-3),
}
LINEAR: dict[str, Change] = {
    "unchanged": lambda gradient: gradient,
    "reversed": lambda gradient: -0.3 * gradient,
    "masked": lambda gradient: gradient * torch.linspace(0, 1, gradient.shape[-1], dtype=gradient.dtype),
    "freed of not numbers": torch.nan_to_num,
    "stopped": torch.zeros_like,
}
PLACES = [on_output, on_weights, of_module, own_function]


@pytest.mark.parametrize("change", NONLINEAR)
@pytest.mark.parametrize("place", PLACES)
def test_what_clips_or_shifts_gradients_is_refused(place: Callable[[Change], Layer], change: str) -> None:
    with pytest.raises(RequestError, match=r"layer 3 \(Layer\): must have a backward that is linear in the gradient"):
        tried(place(NONLINEAR[change]))


@pytest.mark.parametrize("change", LINEAR)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_linear_is_not(place: Callable[[Change], Layer], change: str, dtype: torch.dtype) -> None:
    assert tried(place(LINEAR[change]), dtype=dtype)


def put_hooks(layer: Layer, value: Tensor) -> Tensor:
    layer.linear.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    return torch.tanh(layer.linear(value))


def test_hooks_that_pile_up_are_refused() -> None:
    with pytest.raises(RequestError, match="must not put a hook on a parameter in its forward"):
        tried(Layer(put_hooks))


def half(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


def step(weight: Tensor) -> None:
    assert weight.grad is not None
    with torch.no_grad():
        weight -= weight.grad


def nothing(weight: Tensor) -> None:
    pass


@pytest.mark.parametrize("hook", [half, step])
def test_hooks_after_accumulation_that_change_something_are_refused(hook: Callable[[Tensor], None]) -> None:
    layer = Layer()
    layer.linear.weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    value = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(RequestError, match=r"must (not change gradients or weights in hooks after accumulation)"):
        repeats(3, layer, value, layer, narrow=False)


def test_hooks_after_accumulation_that_look_on_are_not() -> None:
    layer = Layer()
    layer.linear.weight.register_post_accumulate_grad_hook(nothing)  # type: ignore[no-untyped-call]
    assert tried(layer)


def count(layer: Layer, value: Tensor) -> Tensor:
    layer.calls += 1
    return torch.tanh(layer.linear(value)) * (1 + layer.calls)


def warm_up(layer: Layer, value: Tensor) -> Tensor:
    layer.calls += 1
    return torch.tanh(layer.linear(value)) * (1 if layer.calls < 3 else 2)


def draw(layer: Layer, value: Tensor) -> Tensor:
    return torch.tanh(layer.linear(value)) * torch.rand(WIDTH, generator=layer.generator)


def drop(layer: Layer, value: Tensor) -> Tensor:
    return nn.functional.dropout(torch.tanh(layer.linear(value)), 0.5)


def run_again(layer: Layer, value: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda given: torch.tanh(layer.linear(given)), value, use_reentrant=False)
    return made


@pytest.mark.parametrize(
    ("forward", "same"), [(count, False), (warm_up, False), (draw, False), (drop, True), (run_again, True)]
)
def test_what_gives_something_else_again(forward: Callable[[Layer, Tensor], Tensor], same: bool) -> None:
    assert tried(Layer(forward)) is same


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        made = super().forward(value) * self.get_buffer("runs").clone()
        self.get_buffer("runs").add_(1)
        return made


def normed(norm: Callable[[nn.Module], nn.Module]) -> Layer:
    layer = Layer()
    norm(layer.linear)
    return layer


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize(
    "make",
    [
        Counting,
        lambda: normed(nn.utils.parametrizations.spectral_norm),
        lambda: normed(nn.utils.spectral_norm),
        lambda: normed(nn.utils.parametrizations.weight_norm),
    ],
)
def test_what_buffers_remember_is_no_difference(make: Callable[[], Layer]) -> None:
    """A power iteration goes on where the last forward has ended; each forward of the trial begins where it does."""
    torch.manual_seed(0)
    for _ in range(5):
        assert tried(make())


def test_torchs_own_layers_need_no_trial() -> None:
    assert is_torchs_own(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LSTM(2, 2)))
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    assert not is_torchs_own(nn.Sequential(hooked))
    assert not is_torchs_own(nn.Sequential(Layer()))


def test_plans_that_run_such_a_layer_again_are_refused() -> None:
    profile = model([row(name="a"), row(name="b", repeats=False), row(name="c")])
    config = resolve(["activation_checkpoint=full"])
    again = tuple(Segment(at, at, recompute=True) for at in range(3))
    (problem,) = in_place_problems(config, profile, ActivationPlan((again,)))
    assert problem.why.startswith("Layer 1 (b) does, with the same input")
    kept = (Segment(0, 0, recompute=True), Segment(1, 2))
    assert not list(in_place_problems(config, profile, ActivationPlan((kept,))))


def test_plans_that_run_a_layer_again_from_what_it_changed_are_refused() -> None:
    tensors = [(BoundaryTensor(number, 8, 8),) for number in (0, 0, 1)]  # the second layer changes its input
    rows = [row(output=tensors[0]), row(output=tensors[1], writes=(0,)), row(output=tensors[2])]
    config = resolve(["activation_checkpoint=full"])
    for bounds, refused in (([(0, 0), (1, 1), (2, 2)], True), ([(0, 1), (2, 2)], False), ([(0, 0), (1, 2)], True)):
        chain = tuple(Segment(first, last, recompute=True) for first, last in bounds)
        problems = list(in_place_problems(config, model(rows), ActivationPlan((chain,))))
        assert bool(problems) is refused
        inside = (Segment(0, 2, recompute=True, inside=chain),)
        assert bool(list(in_place_problems(config, model(rows), ActivationPlan((inside,))))) is refused
