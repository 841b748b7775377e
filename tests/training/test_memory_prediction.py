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
    "copies of what compression leaves out": (
        "model=mlp", "parallelism.data=2", "compression=powersgd", "checkpoint=asynchronous", "checkpoint.every=1",
    ),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
def test_counted_peaks_are_the_predicted_ones(tmp_path: Path, case: str) -> None:
    words = ("parallelism.pipeline=2", "trainer.max_steps=3", "device=cpu", *CASES[case])
    memory = thread_runs.result(tmp_path, words=words)[0]["peak_memory_bytes"]
    replicas = max(len(memory["measured"]) // 2, 1)
    for first in range(0, len(memory["measured"]), replicas):
        predicted, measured = (max(memory[key][first : first + replicas]) for key in ("predicted", "measured"))
        assert 0.99 * predicted <= measured <= predicted


@pytest.mark.costly
def test_states_of_predictions_end_with_them(tmp_path: Path) -> None:
    """The gradients that xgrad keeps are not kept by a run that goes on without it."""
    words = ("model=mlp", "optimizer=rmsprop", "device=cpu")
    thread_runs.result(tmp_path, words=(*words, "weight_prediction=xgrad", "trainer.max_steps=1"), run="first")
    resume = f"resume={tmp_path / 'first' / 'checkpoints' / 'step-1.ckpt'}"
    memory = thread_runs.result(tmp_path, words=(*words, "trainer.max_steps=3", resume))[0]["peak_memory_bytes"]
    assert memory["measured"][0] <= memory["predicted"][0]
