"""What the profile says that a split backward keeps is what its W holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runner.model.live_tracker import LiveTracker
from runner.profile import SplitBackward
from runner.profiling.split_scan import split_figures

BYTES = 4


def figures(module: nn.Module, value: torch.Tensor) -> SplitBackward:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveTracker() as tracker:
        found = split_figures(module, value, tracker)
        assert tracker.live == 0
    return found


def test_a_product_keeps_its_input_and_the_gradient_of_its_output() -> None:
    found = figures(nn.Linear(6, 10), torch.randn(8, 6))
    assert (found.deferred_bytes, found.input_bytes, found.gradient_bytes) == (0, 8 * 6 * BYTES, 8 * 10 * BYTES)


@pytest.mark.parametrize("layer", [nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.5)], ids=["norm", "gelu", "dropout"])
def test_what_has_no_product_keeps_nothing(layer: nn.Module) -> None:
    found = figures(layer, torch.randn(8, 6))
    assert (found.deferred_bytes, found.input_bytes, found.gradient_bytes) == (0, 0, 0)


def test_inside_of_a_layer_the_products_operands_stay_and_nothing_else() -> None:
    """Of Linear, GELU, Linear: the first's output gradient and the second's input; the GELU's input is gone."""
    found = figures(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 4)), torch.randn(8, 6))
    assert found.input_bytes == 8 * 6 * BYTES
    assert found.gradient_bytes == 8 * 4 * BYTES
    assert found.deferred_bytes == 2 * 8 * 10 * BYTES
    assert found.transient_bytes >= 8 * 6 * BYTES


def test_a_frozen_layer_keeps_nothing() -> None:
    found = figures(nn.Linear(6, 10).requires_grad_(False), torch.randn(8, 6))
    assert (found.deferred_bytes, found.input_bytes, found.gradient_bytes) == (0, 0, 0)


def test_gradients_of_norms_and_biases_wait_for_the_end_of_i() -> None:
    """That of the weight of a product does not: W makes it."""
    found = figures(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10)), torch.randn(8, 6, requires_grad=True))
    assert found.waiting_bytes == (6 + 6 + 10) * BYTES
    assert found.transient_bytes >= found.waiting_bytes
