"""Which weights' gradients stay in I, why, and how much of the backward they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_profiles import layer, model
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from runner.model.live_tracker import LiveTracker
from runner.model.split.graph import Graph
from runner.model.split.reasons import kept_in_input
from runner.plan.split_notes import split_notes
from runner.profile import ModelProfile, SplitBackward, profile_from_json
from runner.profiling.split_scan import split_figures
from runner.schedule.catalogue import registry

SAMPLES, WIDTH = 32, 8
PRODUCT = 2.0 * SAMPLES * WIDTH * WIDTH


class Scaled(nn.Module):
    """A product that is scaled in one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return torch.addmm(value, value, self.weight, alpha=2.0)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), value.t() @ gradients[0]


class Whole(Scaled):
    """A product that is a function of the user's."""

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = _Product.apply(value, self.weight)  # type: ignore[no-untyped-call, unused-ignore]
        return made


def hooked() -> nn.Module:
    made = nn.Linear(WIDTH, WIDTH)
    made.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    return made


def figures(module: nn.Module, *, first: bool = False) -> SplitBackward:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveTracker() as tracker:
        value = torch.randn(SAMPLES, WIDTH).requires_grad_(not first)
        return split_figures(module, value, tracker, module, 2 * PRODUCT)


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        (Scaled(), "weight", "Addmm takes it together with the layer's input"),
        (Whole(), "weight", "_Product takes it together with the layer's input"),
        (hooked(), "weight", "hooks"),
    ],
    ids=["scaled", "function", "hook"],
)
def test_what_stays_and_why(module: nn.Module, name: str, reason: str) -> None:
    found = figures(module)
    ((kept, why),) = found.kept
    assert (kept, found.kept_share) == (name, 0.5)
    assert reason in why


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.TransformerEncoderLayer(WIDTH, 2, WIDTH),
    ],
    ids=["linear", "norm", "weight norm", "transformer"],
)
def test_nothing_stays(module: nn.Module) -> None:
    found = figures(module)
    assert (found.kept, found.kept_share) == ((), 0.0)


@pytest.mark.parametrize(
    ("in_one_piece", "figures", "share"),
    [
        (False, (4.0, 3.0, 2.0), 0.25),
        (False, (4.0, 2.0, 2.5), 0.0),
        (True, (4.0, 4.0, 4.0), 0.5),
        (True, (4.0, 6.0, 6.0), 0.5),
        (True, (4.0, 3.0, 1.0), 0.5),
    ],
)
def test_the_share(in_one_piece: bool, figures: tuple[float, float, float], share: float) -> None:
    """Of a whole backward, I, and the input's gradient alone."""
    found = SplitBackward(0, 0, 0, 0, kept_in_one_piece=in_one_piece).with_kept_share(*figures)
    assert found.kept_share == share


def test_of_the_first_layer_nothing_is_told() -> None:
    assert figures(Scaled(), first=True).kept == ()


def profile_of(shares: list[float]) -> ModelProfile:
    return model([layer(split=SplitBackward(0, 0, 0, 0, share, (("weight", "because"),))) for share in shares])


@pytest.mark.parametrize(
    ("name", "shares", "told"),
    [
        ("zb_h1", [0.4, 0.4, 0.4, 0.0], "layers 1, 2: up to 40% of the backward stays in I (weight: because)"),
        ("zb_h1", [0.4, 0.1, 0.0, 0.0], None),
        ("1f1b", [0.4, 0.4, 0.4, 0.4], None),
    ],
    ids=["matters", "little", "whole backwards"],
)
def test_the_plan_tells_it_where_it_matters(name: str, shares: list[float], told: str | None) -> None:
    schedule = registry.build(name, ranks=4, microbatches=4)
    notes = split_notes(schedule, profile_of(shares), [(at, at) for at in range(4)])
    assert list(notes[1:]) == ([told] if told else [])
    assert bool(notes) == bool(told)


def test_a_layer_that_keeps_all_in_i_has_no_w_where_seconds_are_estimated() -> None:
    estimated = layer(backward_seconds=2.0, split=SplitBackward(0, 0, 0, 0, 0.5, (("weight", "because"),)))
    assert estimated.split_seconds == (2.0, 0.0)


def test_a_profile_with_reasons_returns_from_its_file() -> None:
    profile = profile_of([0.4, 0.0])
    assert profile_from_json(profile.to_json()) == profile


def test_outputs_and_weights_have_one_order() -> None:
    """Else the order of W, with its peak, and the names in a plan would differ from one process to the next."""
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(16)]
    seen = set()
    for _ in range(8):
        x = torch.randn(2, 4, requires_grad=True)
        outputs = [x @ weight for weight in weights]
        made = sum(weight @ weight for weight in weights)
        product: Tensor = _Product.apply(x, made)  # type: ignore[no-untyped-call, unused-ignore]
        behind = kept_in_input([product], [x])
        order = [
            number for leaf in Graph(outputs).leaves for number, each in enumerate(weights) if each is leaf.variable
        ]
        names = [number for kept in behind for number, each in enumerate(weights) if each is kept.weight]
        seen.add((*order, *names))
    assert len(seen) == 1
    assert len({*seen.pop()}) == len(weights)
