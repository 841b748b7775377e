"""Hooks of many kinds act as often as in plain PyTorch, whatever is run again, and however a backward is divided."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from requests_in_threads import SGD, in_plain_pytorch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runner.memory.apply.install import install
from runner.memory.solve.values import Segment
from runner.model.layers import StageModule

WIDTH = 7
Forward = Callable[["Hooked", Tensor], Tensor]


class Hooked(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear, self.run, self.calls = nn.Linear(WIDTH, WIDTH), forward, 0

    def forward(self, value: Tensor) -> Tensor:
        return self.run(self, value)


def threefold(gradient: Tensor) -> Tensor:
    return gradient * 3


def hook(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(threefold)  # type: ignore[no-untyped-call]  # torch's own
    return tensor


def on_input(layer: Hooked, value: Tensor) -> Tensor:
    return torch.tanh(layer.linear(hook(value)))


def on_a_view_of_the_input(layer: Hooked, value: Tensor) -> Tensor:
    return torch.tanh(layer.linear(torch.cat([hook(value[:, :3]), value[:, 3:]], 1)))


def within(layer: Hooked, value: Tensor) -> Tensor:
    return hook(torch.tanh(layer.linear(value))) * 1.1


def on_output(layer: Hooked, value: Tensor) -> Tensor:
    return hook(torch.tanh(layer.linear(value)))


def on_the_input_passed_on(layer: Hooked, value: Tensor) -> Tensor:
    hook(value)
    return value + torch.tanh(layer.linear(value))


def on_a_node(layer: Hooked, value: Tensor) -> Tensor:
    if value.grad_fn is not None:
        value.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
    return torch.tanh(layer.linear(value))


def on_several(layer: Hooked, value: Tensor) -> Tensor:
    made = torch.tanh(layer.linear(value))
    if value.requires_grad:
        weight = layer.linear.weight

        def change(gradients: Any) -> None:
            with torch.no_grad():  # the gradient of the input, which has not been used yet
                gradients[0].mul_(1.0)
            layer.calls += 1

        torch.autograd.graph.register_multi_grad_hook((value, made), change)
        assert weight.requires_grad
    return made


def in_own_checkpoint(layer: Hooked, value: Tensor, *, reentrant: bool) -> Tensor:
    result: Tensor = checkpoint(lambda given: torch.tanh(layer.linear(hook(given))), value, use_reentrant=reentrant)
    return result


def with_own_saving(layer: Hooked, value: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor / 2):
        return torch.tanh(layer.linear(hook(value)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        made: Tensor = -0.5 * gradient * value.sigmoid()
        return made


def own_function(layer: Hooked, value: Tensor) -> Tensor:
    result: Tensor = Reversed.apply(hook(torch.tanh(layer.linear(value))))  # type: ignore[no-untyped-call, unused-ignore]
    return result


def differentiated_within(layer: Hooked, value: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.tanh(layer.linear(value))
    made = torch.tanh(layer.linear(value))
    (gradient,) = torch.autograd.grad(made.sum(), value, create_graph=True)
    return made + 0.1 * gradient


FORWARDS: dict[str, Forward] = {
    "input": on_input,
    "view of the input": on_a_view_of_the_input,
    "within": within,
    "output": on_output,
    "input passed on": on_the_input_passed_on,
    "node": on_a_node,
    "several": on_several,
    "own checkpoint": partial(in_own_checkpoint, reentrant=False),
    "own checkpoint, re-entrant": partial(in_own_checkpoint, reentrant=True),
    "own saving": with_own_saving,
    "own function": own_function,
    "differentiated within": differentiated_within,
}


def plainly(layer: Hooked, value: Tensor) -> Tensor:
    return torch.tanh(layer.linear(value))


def twofold(gradients: Any) -> tuple[Tensor, ...]:
    return tuple(2 * gradient for gradient in gradients)


def with_module_hook(kind: str) -> Hooked:
    layer = Hooked(plainly)
    match kind:
        case "full backward":
            layer.register_full_backward_hook(lambda module, of_input, of_output: twofold(of_input))
        case "full backward, before":
            layer.register_full_backward_pre_hook(lambda module, of_output: twofold(of_output))
        case "forward":
            layer.register_forward_hook(lambda module, given, made: hook(made) * 2)
        case "forward, before":
            layer.register_forward_pre_hook(lambda module, given: (hook(given[0]) * 2,))
        case "parameters":
            for parameter in layer.parameters():
                parameter.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    return layer


MODULE_HOOKS = ["full backward", "full backward, before", "forward", "forward, before", "parameters"]


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(3)
    layer = Hooked(FORWARDS[kind]) if kind in FORWARDS else with_module_hook(kind)
    return nn.Sequential(
        nn.Linear(5, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        layer,
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 4),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = ((torch.randn(8, 5, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(3))
    return list(made)


def plain(kind: str) -> tuple[list[float], dict[str, Tensor], int]:
    model = make_model(kind)
    losses = in_plain_pytorch(model, functional.cross_entropy, batches())
    return losses, model.state_dict(), model[3].calls  # type: ignore[return-value]


def layer_by_layer(stage: StageModule, number: int) -> None:
    install(stage, tuple(Segment(at, at, recompute=True) for at in range(stage.first_layer, stage.last_layer + 1)))


def all_at_once(stage: StageModule, number: int) -> None:
    install(stage, (Segment(stage.first_layer, stage.last_layer, recompute=True),))


def inside_of_each_other(stage: StageModule, number: int) -> None:
    first, last = stage.first_layer, stage.last_layer
    inside = tuple(Segment(at, at, recompute=True) for at in range(first, last + 1))
    install(stage, (Segment(first, last, recompute=True, inside=inside),))


POLICIES = {"none": None, "layer": layer_by_layer, "stage": all_at_once, "nested": inside_of_each_other}


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [*FORWARDS, *MODULE_HOOKS])
def test_as_often_as_in_plain_pytorch(kind: str, policy: str) -> None:
    expected, state, _ = plain(kind)
    for schedule in ("1f1b", "zb_h1") if policy == "none" else ("1f1b",):
        losses, weights = train_in_threads(
            partial(make_model, kind), functional.cross_entropy, batches(), schedule=schedule, pipeline=2, data=1,
            count=2, optimizer=SGD, prepare=POLICIES[policy],
        )  # fmt: skip
        torch.testing.assert_close(losses[0], expected, rtol=2e-6, atol=0.0)
        torch.testing.assert_close(weights, dict(state), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hook_that_counts(policy: str) -> None:
    """It is called once for each backward, and its tensors are those of the first run."""
    _, _, calls = plain("several")
    models = [make_model("several") for _ in range(2)]
    given = iter(models)
    train_in_threads(
        lambda: next(given), functional.cross_entropy, batches(), schedule="1f1b", pipeline=2, data=1, count=2,
        optimizer=SGD, prepare=POLICIES[policy],
    )  # fmt: skip
    assert sum(model[3].calls for model in models) == 2 * calls  # type: ignore[misc]  # of two micro-batches
