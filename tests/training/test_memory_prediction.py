"""The measured peak memory of every rank is never above the predicted one, and at most 1 % below it."""

from __future__ import annotations

from pathlib import Path

import pytest
import thread_runs

CASES = {
    "backwards in two parts": ("model=gpt", "schedule=zb_v", "data.batch_size=32", "schedule.microbatches=8"),
    "the norm of a wide layer's gradient": (
        "model=mlp", "model.kwargs.width=256", "model.kwargs.layers=3", "data.batch_size=4", "precision=bf16",
        "trainer.grad_clip_norm=0.3", "parallelism.pipeline=1",
    ),
    "inputs that are copied in the format of the weights": (
        "model=mlp", "model.kwargs.inputs=1024", "data.kwargs.inputs=1024", "data.batch_size=256", "optimizer=sgd",
        "schedule.microbatches=4", "precision=bf16",
    ),
    "copies from which checkpoints are written": (
        "model=mlp", "schedule.microbatches=4", "checkpoint=asynchronous", "checkpoint.every=1",
    ),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
def test_counted_peaks_are_the_predicted_ones(tmp_path: Path, case: str) -> None:
    words = ("parallelism.pipeline=2", "trainer.max_steps=3", "device=cpu", *CASES[case])
    memory = thread_runs.result(tmp_path, words=words)[0]["peak_memory_bytes"]
    for predicted, measured in zip(memory["predicted"], memory["measured"], strict=True):
        assert 0.99 * predicted <= measured <= predicted
