"""What an optimizer's step makes and drops is what its kind says: the peak of live tensors during a real step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from covering import covering
from plan_profiles import layer, model
from torch import Tensor, nn

from runner.config.compose.resolve import resolve
from runner.config.schema import OptimizerConfig
from runner.model.live_tracker import LiveTracker
from runner.optim.catalogue.registry import OPTIMIZERS
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import temporary_bytes
from runner.plan.stages.figures import stage_figures
from runner.profiling.optimizer_figures import _state_ratios, state_bytes_of
from runner.profiling.own_updates import observed_update

SIDE = 128
SHAPES: tuple[list[tuple[int, ...]], ...] = (
    [(SIDE, SIDE)],
    [(SIDE, SIDE), (SIDE, SIDE)],
    [(SIDE,), (SIDE, SIDE), (SIDE, 2 * SIDE), (SIDE,)],
)
EXACT = ("adamw", "adam", "rmsprop", "sgd")
NEAR = ("adabelief", "lamb")  # pytorch_optimizer's loops keep small tensors of the parameter before the last one
BOUNDED = ("auto", "adam4bit", "adam_fp8", "muon", "onebit_adam", "onebit_lamb", "onebit_adam_refreshed", "lars")
SCALARS = 64  # bytes of norms and rates that some make


def _section(name: str, weight_decay: float) -> OptimizerConfig:
    return resolve(["model=mlp", f"optimizer={name}", f"optimizer.weight_decay={weight_decay}"]).optimizer


def _measured(make: Callable[[list[Tensor]], torch.optim.Optimizer], shapes: Sequence[tuple[int, ...]]) -> int:
    weights: list[Tensor] = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    for _ in range(2):
        optimizer.step()
    with LiveTracker() as tracker:
        optimizer.step()
        peak: int = tracker.peak
    return peak


def _predicted(needs: MemoryNeeds, shapes: Sequence[tuple[int, ...]]) -> int:
    """One layer per parameter: what lies before the first of a layer is the last of the layer before."""
    numbers = [4 * torch.Size(shape).numel() for shape in shapes]
    layers = [
        layer(gradient_bytes=each, largest_parameter_bytes=each, trained_shapes=(shape,))
        for each, shape in zip(numbers, shapes, strict=True)
    ]
    profile = model(layers)
    (figures,) = stage_figures(profile, ((0, len(layers) - 1),))
    return temporary_bytes(figures, profile, needs)


@pytest.mark.parametrize(
    ("weight_decay", "name"), covering({"decay": [0.0, 0.1], "name": [*EXACT, *NEAR, *BOUNDED]}, strength=1)
)
def test_a_step_makes_and_drops_what_its_kind_says(name: str, weight_decay: float) -> None:
    section, kind = _section(name, weight_decay), OPTIMIZERS[name]
    needs = MemoryNeeds(1, temporaries=kind.temporaries_of(section), lingering=kind.lingering)
    for shapes in SHAPES:
        measured, predicted = _measured(partial(kind.make, section), shapes), _predicted(needs, shapes)
        share = 0.01 if name in NEAR else 0.0
        assert measured <= (1 + share) * predicted + SCALARS, shapes
        if name not in BOUNDED:
            assert measured >= (1 - share) * predicted - SCALARS, shapes


@pytest.mark.parametrize("name", [*EXACT, *NEAR, *BOUNDED])
def test_states_are_as_large_as_a_plan_says(name: str) -> None:
    """With the counts of steps, where an operator makes them."""
    config = resolve(["model=mlp", f"optimizer={name}"])
    shapes = SHAPES[-1]
    per_byte, _ = _state_ratios(config, torch.float32)
    of_shape = state_bytes_of(config, torch.float32) or (lambda shape: round(4 * per_byte * shape.numel()))
    weights: list[Tensor] = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    with LiveTracker() as tracker:
        optimizer = OPTIMIZERS[name].make(config.optimizer, weights)
        optimizer.step()
        gc.collect()
        assert tracker.live == sum(of_shape(torch.Size(shape)) for shape in shapes)


def in_groups(weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Weights with a decay, and biases without, as they are often put."""
    decayed = [weight for weight in weights if weight.ndim > 1]
    others = [weight for weight in weights if weight.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def test_an_optimizer_with_groups_goes_in_another_order_than_the_model() -> None:
    """Two matrices are then neighbours, though a vector lies between them; the last temporary of one meets the next."""
    assert not observed_update(torch.optim.AdamW).in_groups
    own, shapes = observed_update(in_groups), [(SIDE, SIDE), (SIDE,), (SIDE, SIDE), (SIDE,)]
    needs = MemoryNeeds(1, temporaries=own.temporaries, lingering=own.lingering, in_any_order=own.in_groups)
    measured = _measured(in_groups, shapes)
    assert measured <= _predicted(needs, shapes) <= measured + SCALARS
    assert _predicted(replace(needs, in_any_order=False), shapes) < measured
