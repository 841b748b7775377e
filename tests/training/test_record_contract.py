"""What a run leaves in ``record.json``, and a validation at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from user_project import STEPS, make_directory, result

KEYS = {
    "status", "reason", "command", "config", "fingerprint", "layout", "versions", "hardware", "commit", "steps", "loss",
    "val_loss", "step_seconds", "samples_per_second", "bubble_ratio", "seconds", "flops_per_step", "mfu",
    "bytes_moved", "peak_memory_bytes", "artifacts",
}  # fmt: skip


@pytest.mark.costly
def test_the_contracts_keys_and_a_validation_at_the_end(tmp_path: Path) -> None:
    """Two validations: after step 3, and after the last, which 3 does not divide."""
    directory = make_directory(tmp_path)
    made, _ = result(directory, "parallelism.pipeline=2", "schedule.microbatches=4", "trainer.val_every=3",
                     "trainer.max_steps=7", "logger=csv")  # fmt: skip
    assert made.keys() >= KEYS
    assert (made["status"], made["reason"]) == ("ok", None)
    assert made["steps"] == len(made["loss"]) == 7 > STEPS
    assert [step for step, _ in made["val_loss"]] == [3, 6, 7]
    assert made["seconds"].keys() == {
        "data",
        "compute",
        "communication",
        "bubble",
        "optimizer",
        "offload",
        "callbacks",
        "rest",
    }
    walls = made["step_seconds"]
    assert len(walls["all"]) % 2, "so that one step is the median"
    assert walls["predicted"] > 0
    assert made["samples_per_second"] == pytest.approx(8 / walls["median"])
    assert 0 < made["bubble_ratio"]["predicted"] < 1
    assert 0 < made["bubble_ratio"]["measured"] < 1
    memory = made["peak_memory_bytes"]
    assert memory["kind"] == "tensor_bytes"
    assert [len(memory[key]) for key in ("predicted", "measured")] == [2, 2]
    assert _bytes_over_the_cut(made) == (8 * 12 * 4, 8 * 12 * 4)
    assert all((directory / "run" / path).exists() for path in made["artifacts"].values())
    assert {"weights", "steps", "checkpoint", "csv", "timeline"} <= made["artifacts"].keys()


def _bytes_over_the_cut(made: dict[str, Any]) -> tuple[float, float]:
    return made["bytes_moved"]["activations"], made["bytes_moved"]["activation_gradients"]
