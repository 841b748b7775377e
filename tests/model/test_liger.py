"""What Liger's operators stand for in layers, with functions in place of Liger that compute the same by torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.config.schema import LossConfig
from runner.errors import RequestError
from runner.launch.needs.packages import missing_for_plan, missing_packages
from runner.launch.run.prepare import prepare
from runner.model.kernels.choice import Kernels
from runner.model.layers import LayerSource
from runner.zoo.losses import token_cross_entropy

WIDTH, CLASSES = 12, 7


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Any:
        assert mode == ("gemma" if offset else "llama")
        assert not in_place
        root = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(value * root, root, weight + offset)
        return value * root * (weight + offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normed, root, weight = ctx.saved_tensors
        inner = gradients[0] * weight
        below = root * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return below, (gradients[0] * normed).flatten(0, -2).sum(0), None, None, None, None


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        centred = value - value.mean(-1, keepdim=True)
        root = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(centred * root, root, weight)
        return centred * root * weight + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normed, root, weight = ctx.saved_tensors
        inner = gradients[0] * weight
        centred = inner - inner.mean(-1, keepdim=True)
        below = root * (centred - normed * (inner * normed).mean(-1, keepdim=True))
        return below, (gradients[0] * normed).flatten(0, -2).sum(0), gradients[0].flatten(0, -2).sum(0), None


class SiluMul(torch.autograd.Function):
    """Writes the gradients over what it was given, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Any:
        ctx.save_for_backward(gate, value)
        return functional.silu(gate) * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, value = ctx.saved_tensors
        chance = gate.sigmoid()
        of_gate, of_value = gradients[0] * value * chance * (1 + gate * (1 - chance)), gradients[0] * gate * chance
        return gate.detach().copy_(of_gate), value.detach().copy_(of_value)


class GeluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Any:
        ctx.save_for_backward(gate, value)
        return functional.gelu(gate, approximate="tanh") * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, value = ctx.saved_tensors
        of_gate = torch.ops.aten.gelu_backward(gradients[0] * value, gate, approximate="tanh")
        return of_gate, gradients[0] * functional.gelu(gate, approximate="tanh")


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: None, ignored: int,
        squares: float, smoothing: float, reduction: str,
    ) -> Any:  # fmt: skip
        assert (bias, classes, squares, smoothing, reduction) == (None, None, 0.0, 0.0, "sum")
        logits = value @ weight.T
        chances = logits.softmax(-1) - functional.one_hot(target.clamp(min=0), len(weight))
        chances = chances.masked_fill((target == ignored)[:, None], 0.0)
        ctx.save_for_backward(chances @ weight, chances.T @ value)
        return functional.cross_entropy(logits, target, ignore_index=ignored, reduction="sum"), None, None, None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        below, of_weight = ctx.saved_tensors
        return gradients[0] * below, gradients[0] * of_weight, *[None] * 7


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("liger_kernel.ops")
    fake.LigerRMSNormFunction, fake.LigerLayerNormFunction = RmsNorm, LayerNorm
    fake.LigerSiLUMulFunction, fake.LigerGELUMulFunction = SiluMul, GeluMul
    fake.LigerFusedLinearCrossEntropyFunction = LinearCrossEntropy
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", fake)


class Written(nn.Module):
    """An RMS norm as models of transformers write it, with what Gemma adds to its weight."""

    def __init__(self, offset: float = 0.0, power: int = 2) -> None:
        super().__init__()
        self.weight, self.offset, self.power = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH)), offset, power

    def forward(self, value: Tensor) -> Any:
        wide = value.float()
        normed = wide * torch.rsqrt(wide.abs().pow(self.power).mean(-1, keepdim=True) + 1e-6)
        return (self.offset + self.weight) * normed if self.offset else self.weight * normed


class Gated(nn.Module):
    """Whose gate and features something else reads, too."""

    def __init__(self, activation: Callable[[Tensor], Tensor], *, first: bool = True, features: int = 8) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, features, bias=False)
        self.activation, self.first = activation, first

    def forward(self, value: Tensor) -> Any:
        gate, up = self.gate(value), self.up(value)
        made = self.activation(gate) * up if self.first else up * self.activation(gate)
        return torch.cat([made, gate.sum(-1, keepdim=True), up.sum(-1, keepdim=True)], -1)


def tanh_gelu(value: Tensor) -> Tensor:
    return functional.gelu(value, approximate="tanh")


def both(make: Callable[[], nn.Module], switch: str) -> Kernels:
    """Compare a layer as it is written with Liger's operators in it: outputs, gradients and names."""
    torch.manual_seed(4)
    plain, kernels = make(), Kernels({switch: "liger"})
    module = deepcopy(plain)
    source = kernels.of_layers([LayerSource(0, "0", lambda: module)])[0]
    layer = source.calling(source.build())
    for samples in (5, 3):
        value, results = torch.randn(samples, 6, WIDTH), []
        for function, owner in ((plain, plain), (layer, module)):
            owner.zero_grad()
            given = value.clone().requires_grad_()
            output = function(given)
            torch.autograd.backward(output.square().sum())
            results.append((output, given.grad, *(each.grad for each in owner.parameters())))
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert module.state_dict().keys() == plain.state_dict().keys()
    return kernels


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize(
    ("make", "switch", "made"),
    [
        (Written, "norm", "rms_norm"),
        (lambda: Written(1.0), "norm", "rms_norm"),
        (lambda: nn.RMSNorm(WIDTH), "norm", "rms_norm"),
        (lambda: nn.LayerNorm(WIDTH), "norm", "layer_norm"),
        (lambda: Gated(functional.silu), "elementwise", "silu"),
        (lambda: Gated(functional.silu, first=False), "elementwise", "silu"),
        (lambda: Gated(tanh_gelu), "elementwise", "gelu"),
    ],
)
def test_a_layer_computes_the_same_with_ligers_operators(make: Callable[[], nn.Module], switch: str, made: str) -> None:
    kernels = both(make, switch)
    assert kernels.substituted() == (f"Liger's {made} at 1 place",)
    assert not [*kernels.problems()]


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize(
    ("make", "switch"),
    [
        (lambda: Written(power=3), "norm"),
        (lambda: nn.LayerNorm(WIDTH, bias=False), "norm"),
        (lambda: Gated(functional.gelu), "elementwise"),
        (lambda: Gated(functional.mish), "elementwise"),
        (lambda: Gated(functional.silu, features=1), "elementwise"),
    ],
)
def test_what_liger_has_no_formula_for_stays(make: Callable[[], nn.Module], switch: str) -> None:
    kernels = both(make, switch)
    assert not kernels.substituted()
    (problem,) = kernels.problems()
    assert problem.line().startswith(f"kernels.{switch} = liger: must find")


@pytest.mark.usefixtures("liger")
def test_the_last_map_is_left_to_ligers_loss() -> None:
    torch.manual_seed(4)
    plain, kernels = nn.Linear(WIDTH, CLASSES, bias=False), Kernels({"loss": "liger"})
    module = deepcopy(plain)
    source = kernels.of_layers([LayerSource(0, "0", lambda: module)])[0]
    loss = kernels.loss(token_cross_entropy, LossConfig(target="runner.zoo.losses:token_cross_entropy"))
    value, target = torch.randn(4, 6, WIDTH), torch.randint(CLASSES, (4, 6))
    target[0, :3] = -100
    results = []
    for function, own, owner in ((plain, token_cross_entropy, plain), (source.calling(source.build()), loss, module)):
        total, count = own(function(value), target)
        torch.autograd.backward(total / count)
        results.append((total, count, owner.weight.grad))
    torch.testing.assert_close(results[1], results[0], rtol=2e-6, atol=2e-6, check_dtype=False)
    assert kernels.substituted() == ("Liger's linear_cross_entropy at 1 place",)


COMMON = ("model=gpt", "logger=none", "trainer.max_steps=1", "trainer.progress=false")


def test_a_cpu_is_refused() -> None:
    config = resolve([*COMMON, "kernels=liger", "device=cpu"])
    with pytest.raises(RequestError, match="kernels.norm = liger: must be null, eager or fused on a CPU. Liger's"):
        prepare(config, place_is_made=True)
    assert "liger_kernel" in missing_for_plan(resolve([*COMMON, "kernels.loss=liger", "device=cpu"]))


def test_a_missing_package_is_told_with_what_gets_it() -> None:
    words = (*COMMON, "kernels=liger", "device=cuda")
    for config in (resolve([*words]), resolve([*words, "hardware=a100_80gb"])):
        line = missing_packages(config)["liger_kernel"].line()
        assert line.startswith("kernels.norm = liger: needs liger_kernel, which is not installed. Try pip install")
    assert "liger_kernel" not in missing_for_plan(resolve([*words, "hardware=a100_80gb"]))  # nothing is measured here
