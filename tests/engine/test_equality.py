"""Every layout gives what one process gives, in losses and weights, by a plain PyTorch loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from covering import covering
from layouts import train_in_threads
from reference import train
from torch import nn

BATCH, STEPS = 16, 4
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))


def make_batches(batch: int = BATCH, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 6, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(steps)
    ]


def masked_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``(sum, weight)`` loss: class 0 does not count."""
    counts = (target > 0).float()
    return (nn.functional.cross_entropy(output, target, reduction="none") * counts).sum(), counts.sum()


MATRIX: dict[str, list[Any]] = {
    "schedule": ["naive", "gpipe", "1f1b"],
    "pipeline": [1, 2, 3, 4],
    "data": [1, 2],
    "count": [1, 4, 7],
    "clip_norm": [None, 0.05],
    "dtype": [torch.float32, torch.bfloat16],
}


@pytest.mark.parametrize(list(MATRIX), covering(MATRIX))
def test_equals_one_process(
    schedule: str, pipeline: int, data: int, count: int, clip_norm: float | None, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"count": count, "clip_norm": clip_norm, "optimizer": adamw, "dtype": dtype}
    expected_model = make_model()
    expected = train(
        expected_model, nn.functional.cross_entropy, make_batches(), replicas=data, by_replica=True, **options
    )
    layout: dict[str, Any] = {"pipeline": pipeline, "data": data, "schedule": schedule}
    losses, weights = train_in_threads(make_model, nn.functional.cross_entropy, make_batches(), **layout, **options)
    assert all(rank == losses[0] for rank in losses), "every rank has the same loss at the same step"
    assert losses[0] == expected
    state = expected_model.state_dict()
    assert weights.keys() == state.keys()
    assert [name for name in state if not torch.equal(weights[name], state[name])] == []


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["free", "clip"])
@pytest.mark.parametrize("pipeline", [1, 3])
def test_replicas_equal_one_process_to_rounding(pipeline: int, clip_norm: float | None) -> None:
    """One process accumulates replica after replica; replicas sum their sums."""
    options: dict[str, Any] = {"count": 4, "clip_norm": clip_norm, "optimizer": partial(torch.optim.SGD, lr=0.5)}
    expected_model = make_model()
    expected = train(expected_model, nn.functional.cross_entropy, make_batches(), replicas=2, **options)
    losses, weights = train_in_threads(
        make_model, nn.functional.cross_entropy, make_batches(), pipeline=pipeline, data=2, schedule="1f1b", **options
    )
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=0)
    for name, value in expected_model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("batch", [13, 2])
def test_uneven_and_empty_microbatches(batch: int, data: int) -> None:
    options: dict[str, Any] = {"count": 4, "optimizer": adamw}
    expected_model = make_model()
    expected = train(expected_model, masked_sum, make_batches(batch), replicas=data, **options)
    losses, weights = train_in_threads(
        make_model, masked_sum, make_batches(batch), pipeline=3, data=data, schedule="1f1b", **options
    )
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=0)
    for name, value in expected_model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=2e-4, atol=2e-5)
