"""Approximate backwards in the engine: the same bits in every layout, also where a backward is split."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from layouts import train_in_threads
from torch import Tensor, nn

from runner.model.approximate.layers import Approximation
from runner.model.layers import LayerSource, layers_of


def make_layers(what: Approximation | None) -> list[LayerSource]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.2), nn.SiLU(), nn.Linear(8, 3))
    sources = layers_of(model, 0)
    return sources if what is None else [replace(source, around=what.around) for source in sources]


def half_square(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).pow(2).mean(dim=1).sum() / 2, float(len(output))


def trained(what: Approximation | None, schedule: str, pipeline: int, data: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    batches = [(torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(3)]
    _, weights = train_in_threads(
        lambda: make_layers(what),  # type: ignore[arg-type, return-value]  # layers that were made already
        half_square, batches, schedule=schedule, pipeline=pipeline, data=data, count=4 // data,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    return weights


@pytest.mark.parametrize(("schedule", "pipeline", "data"), [("zb_h1", 2, 1), ("1f1b", 1, 2)])
def test_every_layout_has_the_same_bits(schedule: str, pipeline: int, data: int) -> None:
    """The choices follow from step, micro-batch and layer, not from ranks."""
    expected = trained(Approximation(bits=2, ratio=0.5), "gpipe", 1, 1)
    found = trained(Approximation(bits=2, ratio=0.5), schedule, pipeline, data)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-6 if data > 1 else 0), name
    exact = trained(None, "gpipe", 1, 1)
    assert float((exact["0.weight"] - expected["0.weight"]).abs().max()) > 1e-3
