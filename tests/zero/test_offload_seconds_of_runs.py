"""What DeepSpeed moves to the host is a part of a real step's seconds, which add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from zero_ranks import train_all

STAGES = (1, 2, 3)


def test_offloaded_states_take_their_share_of_a_step(tmp_path: Path) -> None:
    """On a CPU, gradients and weights are copied between the buffers of device and host."""
    runs: dict[str, tuple[str, ...]] = {"kept": ("zero.stage=1",)}
    runs |= {f"host_{stage}": (f"zero.stage={stage}", "offload.optimizer=cpu") for stage in STAGES}
    more = ("parallelism.data=2", "schedule.microbatches=2", "trainer.max_steps=5")
    results = train_all(tmp_path, {name: (*overrides, *more) for name, overrides in runs.items()})
    for name, result in results.items():
        parts = result.record["seconds"]
        assert (parts["offload"] > 0) == (name != "kept"), name
        assert all(seconds >= 0 for seconds in parts.values()), (name, parts)
        assert sum(parts.values()) == pytest.approx(result.record["step_seconds"]["median"], rel=1e-6)
        assert parts["rest"] < 0.9 * sum(parts.values()), (name, parts)
