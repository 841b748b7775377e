"""What an optimizer's step makes and drops is what its kind says: the peak of live tensors during a real step."""

from __future__ import annotations

from collections.abc import Sequence

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


def _measured(section: OptimizerConfig, shapes: Sequence[tuple[int, ...]]) -> int:
    weights: list[Tensor] = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = OPTIMIZERS[section.name].make(section, weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    for _ in range(2):
        optimizer.step()
    with LiveTracker() as tracker:
        optimizer.step()
        peak: int = tracker.peak
    return peak


def _predicted(section: OptimizerConfig, shapes: Sequence[tuple[int, ...]]) -> int:
    """One layer per parameter: what lies before the first of a layer is the last of the layer before."""
    kind = OPTIMIZERS[section.name]
    numbers = [4 * torch.Size(shape).numel() for shape in shapes]
    layers = [
        layer(gradient_bytes=each, largest_parameter_bytes=each, trained_shapes=(shape,))
        for each, shape in zip(numbers, shapes, strict=True)
    ]
    profile = model(layers)
    (figures,) = stage_figures(profile, ((0, len(layers) - 1),))
    needs = MemoryNeeds(1, temporaries=kind.temporaries_of(section), lingering=kind.lingering)
    return temporary_bytes(figures, profile, needs)


@pytest.mark.parametrize(
    ("weight_decay", "name"), covering({"decay": [0.0, 0.1], "name": [*EXACT, *NEAR, *BOUNDED]}, strength=1)
)
def test_a_step_makes_and_drops_what_its_kind_says(name: str, weight_decay: float) -> None:
    section = _section(name, weight_decay)
    for shapes in SHAPES:
        measured, predicted = _measured(section, shapes), _predicted(section, shapes)
        share = 0.01 if name in NEAR else 0.0
        assert measured <= (1 + share) * predicted + SCALARS, shapes
        if name not in BOUNDED:
            assert measured >= (1 - share) * predicted - SCALARS, shapes
