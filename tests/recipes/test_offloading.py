"""The recipe of offload strategies: what it measures is what was predicted, and its table shows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runner.memory.solve.offloads import OFFLOADS
from runner.recipes.offloading.measure import measure
from runner.recipes.offloading.tables import markdown
from runner.recipes.rematerialization.models import Task
from runner.zoo import gpt

SCALARS = 64  # bytes of the loss and its gradient, which no prediction counts


def small_task() -> Task:
    """A GPT of six blocks, whose step takes some milliseconds."""
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(32, (8, 16), generator=generator) for _ in range(2))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return Task(lambda: gpt.build(32, 16, 32, 6, 2, 0.1), (ids, targets), loss)


@pytest.mark.parametrize("steps", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_peaks_and_moved_bytes_are_those_predicted(steps: int) -> None:
    found = measure(small_task(), share=0.6, links=[1e8, 1e10], steps=steps)
    for rows in found["links"].values():
        assert len(rows) == len(OFFLOADS)  # rotor is beside them, and vdnn_conv refuses a GPT
        for row in rows:
            assert row["measured_bytes"] <= row["predicted_bytes"] + SCALARS
            assert row["predicted_bytes"] <= 1.01 * row["measured_bytes"]
            assert row["measured_moved"] == row["predicted_moved"]
            assert not row["fits"] or row["measured_bytes"] <= found["budget"]
        assert any(row["fits"] and row["measured_moved"] for row in rows)
        assert ("measured_time" in rows[0]) == bool(steps)
    text = markdown({"machine": "a machine", "torch": "2", "date": "today", "models": {"GPT": found}})
    assert "| 0.1 GB/s | `offload.activations=pofo` | yes | " in text
    assert ("measured |" in text) == bool(steps)
