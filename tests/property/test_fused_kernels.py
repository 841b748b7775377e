"""Norms, elementwise chains and the loss as single operators: equal to rounding, and they keep what they read alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tensor_models
import torch
from test_kernels import run, weights_of
from torch import Tensor, nn
from torch.nn import functional
from whole_runs import peaks

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.kernels.choice import Kernels
from runner.model.layers import LayerSource

_CROSS_ENTROPY = "loss.target=runner.zoo.losses:cross_entropy"


class RootMeanSquare(nn.Module):
    """The norm as models write it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, value: Tensor) -> Tensor:
        wide = value.float()
        made: Tensor = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(value.dtype)
        return made


class Gated(nn.Module):
    """Gates in front of features, with a residual that something else reads, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        value = value + 1.0
        gate, up = self.gate(value), self.up(value)
        made: Tensor = functional.silu(gate) * up + 0.5 * gate * (1 + torch.tanh(0.8 * (gate + 0.04 * gate.pow(3))))
        return made


class Linearly(torch.autograd.Function):
    """Whose backward is not what its forward says."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.sigmoid() * value

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return 3 * gradients[0]


class WithFunction(Gated):
    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = Linearly.apply(super().forward(value))  # type: ignore[no-untyped-call, unused-ignore]
        return made


def _doubled(module: nn.Module, below: Any, above: object) -> Any:
    return tuple(2 * each for each in below)


class Hooked(Gated):
    """A module inside whose backward hook changes the gradient."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up.register_full_backward_hook(_doubled)


class Drawing(Gated):
    """Computes by other numbers each time."""

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = super().forward(value) * random.random()
        return made


def kept(function: Callable[[], Tensor], own: set[int]) -> int:
    """The bytes that the backward keeps besides given storages."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    torch.autograd.backward(output.square().sum())
    return sum(size for place, size in found.items() if place not in own)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("switch", "make", "width", "least"),
    [
        ("norm", RootMeanSquare, 24, 0),
        ("norm", lambda width: nn.RMSNorm(width), 40, 0),
        ("elementwise", Gated, 16, 2 * 48),
        ("elementwise", WithFunction, 16, None),
    ],
)
def test_a_layer_keeps_what_its_operators_read(
    switch: str, make: Callable[[int], nn.Module], width: int, least: int | None
) -> None:
    """``least``: the elements of each token that something must keep; None: the layer runs as it is written."""
    torch.manual_seed(4)
    module, kernels = make(width), Kernels({switch: "fused"})
    source = kernels.of_layers([LayerSource(0, "0", lambda: module)])[0]
    for samples in (5, 1, 3):
        value = torch.randn(samples, 7, width)
        results = []
        for function in (module, source.calling(source.build())):
            given = value.clone().requires_grad_()
            module.zero_grad()
            own = {each.untyped_storage().data_ptr() for each in (*module.parameters(), given)}
            size = kept(lambda f=function, g=given: f(g), own)  # type: ignore[misc]
            results.append((size, given.grad, *(each.grad for each in module.parameters())))
        torch.testing.assert_close(results[1][1:], results[0][1:], rtol=2e-6, atol=2e-6)
        # the layer's sums and products with numbers keep their operand for matrices: value + 1
        assert results[1][0] == (
            results[0][0] if least is None else 4 * 7 * samples * (least + (width if least else 0))
        )
    assert kernels.found == (set() if least is None else {switch})
    assert bool(list(kernels.left)) is (least is None)


@pytest.mark.parametrize("make", [Hooked, Drawing])
def test_a_layer_that_does_more_than_a_trace_holds_runs_as_it_is_written(make: Callable[[int], nn.Module]) -> None:
    plain, kernels = make(16), Kernels({"elementwise": "fused"})
    module = deepcopy(plain)
    source = kernels.of_layers([LayerSource(0, "0", lambda: module)])[0]
    layer, value = source.calling(source.build()), torch.randn(5, 7, 16)
    for seed in range(3):
        results = []
        for function in (plain, layer):
            random.seed(seed)
            given = value.clone().requires_grad_()
            output = function(given)
            torch.autograd.backward(output.square().sum())
            results.append((output, given.grad))
        torch.testing.assert_close(results[1], results[0])
    assert not kernels.found
    assert len(kernels.left) == 1


@pytest.mark.costly
@pytest.mark.parametrize(
    "layout",
    [
        ("kernels=fused",),
        ("kernels.loss=fused", "parallelism.pipeline=2", "schedule=zb_h1", "schedule.microbatches=4"),
        ("kernels=fused", "activation_checkpoint=full", "offload=activations_async"),
    ],
)
def test_runs_are_equal_and_planned(layout: tuple[str, ...], tmp_path: Path) -> None:
    plain, fused = (run(tmp_path / name, _CROSS_ENTROPY, *more) for name, more in (("plain", ()), ("fused", layout)))
    torch.testing.assert_close(torch.tensor(fused.losses), torch.tensor(plain.losses), rtol=2e-6, atol=2e-6)
    expected = weights_of(tmp_path / "plain")
    for name, value in weights_of(tmp_path / "fused").items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=3e-5, msg=name)
    for counted, predicted in peaks(fused):
        assert 0.9 * predicted <= counted <= predicted
    if "kernels=fused" in layout:
        layers = [made.plan.profile.layers[1] for made in (plain, fused)]
        tokens = 4 * 8 * tensor_models.LENGTH
        # the statistic of the norm; silu(gate), beside gate and up, which both keep
        assert layers[0].saved_bytes - layers[1].saved_bytes == tokens * (
            tensor_models.WIDTH + 1 + 2 * tensor_models.WIDTH
        )
        assert not fused.plan.profile.own_kernels


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("kernels.norm=fused", "model.target=tensor_models:undividable"), "kernels.norm = fused: must find a norm"),
        (("kernels.loss=fused",), "kernels.loss = fused: must find a linear map.*whose classes all count alike"),
        (("kernels.elementwise=fused", "parallelism.tensor=2"), "kernels.elementwise = fused.*Ranks divide its layers"),
    ],
)
def test_what_a_model_does_not_have_is_refused_where_it_is_named(
    overrides: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=text):
        run(tmp_path, *overrides)


@pytest.mark.costly
def test_a_preset_leaves_it_out_and_says_so(tmp_path: Path) -> None:
    made = run(tmp_path, "kernels=fused", "trainer.max_steps=1")
    (note,) = made.plan.profile.own_kernels
    has_one = hasattr(torch.nn.functional, "linear_cross_entropy")
    why = "torch has one for a cross-entropy" if has_one else "this torch has no linear_cross_entropy"
    assert note.startswith(f"kernels=fused leaves kernels.loss out: {why}")
    assert any(note in line for line in made.plan.advice)
    assert resolve(["kernels=fused"]).kernels.loss == "fused"
