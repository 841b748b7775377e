"""The measured peak memory of every rank is never above the predicted one, and at most 1 % below it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm
from covering import sampled
from user_project import environment, record

pytestmark = pytest.mark.slow
SPLIT = (("zb_v", 32), ("zb_h1", 16))  # schedules with the samples of a step


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("model", sampled(["gpt", "mlp"], "gpt"))
def test_equal_stages_of_both_models(tmp_path: Path, model: str, pipeline: int) -> None:
    words = [
        f"model={model}", f"parallelism.pipeline={pipeline}", "trainer.max_steps=3", "data.batch_size=32",
        "schedule.microbatches=4", "logger=none", "device=cpu", "run_dir=run",
    ]  # fmt: skip
    command = [sys.executable, "-m", "runner", "train", *words]
    done = warm.run(command, cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    memory = record(tmp_path / "run")["peak_memory_bytes"]
    assert len(memory["measured"]) == pipeline
    _holds(memory)


@pytest.mark.parametrize("asked", sampled([*SPLIT, ("interleaved_1f1b", 32), ("varuna", 32)], *SPLIT))
def test_chunks_and_split_backwards(tmp_path: Path, asked: tuple[str, int]) -> None:
    """With two samples in a micro-batch, I's peak is where gradients of norms and biases wait for its end."""
    schedule, samples = asked
    words = [
        "model=gpt", f"schedule={schedule}", "parallelism.pipeline=2", "trainer.max_steps=3",
        f"data.batch_size={samples}", "schedule.microbatches=8", "logger=none", "device=cpu", "run_dir=run",
    ]  # fmt: skip
    command = [sys.executable, "-m", "runner", "train", *words]
    done = warm.run(command, cwd=tmp_path, env=environment(tmp_path), timeout=200)
    assert done.returncode == 0, done.stderr
    _holds(record(tmp_path / "run")["peak_memory_bytes"])


NORMS = [("adamw", "fp32"), ("adamw", "bf16"), ("adamw", "bf16_master"), ("sgd", "fp32"), ("sgd", "bf16_master")]


@pytest.mark.parametrize("asked", sampled(NORMS, ("adamw", "bf16"), ("sgd", "fp32")))
def test_the_norm_of_gradients(tmp_path: Path, asked: tuple[str, str]) -> None:
    """With few samples and one wide layer, the peak is where the squares of its gradient are added up."""
    optimizer, precision = asked
    words = [
        "model=mlp", "model.kwargs.width=256", "model.kwargs.layers=3", "data.batch_size=4", "trainer.max_steps=3",
        "trainer.grad_clip_norm=0.3", f"optimizer={optimizer}", f"precision={precision}", "logger=none", "device=cpu",
        "run_dir=run",
    ]  # fmt: skip
    done = warm.run([sys.executable, "-m", "runner", "train", *words], cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    _holds(record(tmp_path / "run")["peak_memory_bytes"])


CASTS = [("bf16", "1f1b"), ("bf16", "zb_h1"), ("bf16_master", "1f1b"), ("fp16", "interleaved_1f1b")]


@pytest.mark.parametrize("asked", sampled(CASTS, ("bf16", "1f1b")))
def test_wide_inputs_that_are_copied_in_the_format_of_the_weights(tmp_path: Path, asked: tuple[str, str]) -> None:
    """The first stage holds a copy for each of its micro-batches in flight, beside the batch itself."""
    precision, schedule = asked
    words = [
        "model=mlp", "model.kwargs.inputs=1024", "data.kwargs.inputs=1024", "data.batch_size=256", "optimizer=sgd",
        "parallelism.pipeline=2", f"schedule={schedule}", "schedule.microbatches=4", f"precision={precision}",
        "trainer.max_steps=3", "logger=none", "device=cpu", "run_dir=run",
    ]  # fmt: skip
    done = warm.run([sys.executable, "-m", "runner", "train", *words], cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    _holds(record(tmp_path / "run")["peak_memory_bytes"])


def _holds(memory: dict[str, list[int]]) -> None:
    for predicted, measured in zip(memory["predicted"], memory["measured"], strict=True):
        assert 0.99 * predicted <= measured <= predicted
