"""Several stages per rank in any placement, split and recomputed, give what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from covering import covering
from layouts import train_in_threads
from orders import in_order, looping, zigzag
from reference import train
from torch import nn
from torch.nn import functional

from runner.schedule.fuse import fuse_backwards
from runner.schedule.values import Schedule

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"looping": looping, "zigzag": zigzag}


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU(), nn.BatchNorm1d(12)) for _ in range(14)]
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 5))


def make_batches(batch: int, steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 6, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(steps)
    ]


def assert_equals_one_process(schedule: Schedule, batch: int, *, data: int = 1, clip_norm: float | None = None) -> None:
    options = {"count": schedule.microbatches, "clip_norm": clip_norm, "optimizer": adamw}
    expected_model = make_model()
    loss = functional.cross_entropy
    expected = train(expected_model, loss, make_batches(batch), replicas=data, by_replica=True, **options)
    losses, weights = train_in_threads(
        make_model, loss, make_batches(batch), pipeline=schedule.ranks, data=data, schedule=schedule, **options
    )
    assert all(rank == expected for rank in losses)
    state = expected_model.state_dict()
    assert weights.keys() == state.keys()
    assert [name for name in state if not torch.equal(weights[name], state[name])] == []


MATRIX = {
    "placement": ["looping", "zigzag"],
    "ranks": [1, 2, 4],
    "chunks": [2, 3],
    "delay": [None, 0, 3],
    "recomputed": [False, True],
    "batch": [16, 11],
    "clip_norm": [None, 0.05],
}


@pytest.mark.parametrize(list(MATRIX), covering(MATRIX))
def test_equals_one_process(placement, ranks, chunks, delay, recomputed, batch, clip_norm):
    stages = PLACEMENTS[placement](ranks, chunks)
    again = range(0, len(stages), 2) if recomputed else ()
    schedule = in_order(stages, 4, ahead=ranks, delay=delay, recomputed=again)
    assert_equals_one_process(schedule, batch, clip_norm=clip_norm)
    fused = fuse_backwards(schedule)
    if fused != schedule:
        assert_equals_one_process(fused, batch, clip_norm=clip_norm)
