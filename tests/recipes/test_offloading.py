"""The recipe of offload strategies: what it measures is what was predicted, and its table shows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runner.memory.solve.offloads import OFFLOADS
from runner.recipes.offloading.arenas import arena_rows
from runner.recipes.offloading.measure import Bench, measure
from runner.recipes.offloading.tables import markdown
from runner.recipes.rematerialization.models import Task
from runner.zoo import gpt


def small_task() -> Task:
    """A GPT of six blocks, whose step takes some milliseconds."""
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(32, (8, 16), generator=generator) for _ in range(2))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return Task(lambda: gpt.build(32, 16, 32, 6, 2, 0.1), (ids, targets), loss)


@pytest.mark.costly
def test_the_bytes_alive_of_an_arena_are_the_counted_peak() -> None:
    plain, autoswap = arena_rows(small_task(), share=0.6, link=1e8)
    assert plain.peak_bytes == Bench(small_task(), 0).plain.peak_bytes
    for row in (plain, autoswap):
        found = row.figures
        assert found.bound_bytes == row.peak_bytes
        assert found.bound_bytes <= found.arena_bytes <= found.best_fit_bytes
        assert found.arena_bytes < 1.05 * found.bound_bytes
    assert autoswap.peak_bytes < plain.peak_bytes
    assert autoswap.figures.tensors > plain.figures.tensors  # what comes back is made again


@pytest.mark.costly
def test_peaks_and_moved_bytes_are_those_predicted() -> None:
    found = measure(small_task(), share=0.6, links=[1e8], steps=1, step_seconds=0.05)
    for rows in found["links"].values():
        alone = [name for name, offload in OFFLOADS.items() if not (offload.lends or offload.recuts)]
        assert len(rows) == len(alone)  # rotor is beside them, and vdnn_conv refuses a GPT
        for row in rows:
            assert row["measured_bytes"] <= row["predicted_bytes"]
            assert row["predicted_bytes"] <= 1.01 * row["measured_bytes"]
            assert row["measured_moved"] == row["predicted_moved"]
            assert not row["fits"] or row["measured_bytes"] <= found["budget"]
        assert any(row["fits"] and row["measured_moved"] for row in rows)
        assert "measured_time" in rows[0]
    text = markdown({"machine": "a machine", "torch": "2", "date": "today", "models": {"GPT": found}})
    assert "| 0.1 GB/s | `offload.activations=pofo` | yes | " in text
    assert "measured |" in text
