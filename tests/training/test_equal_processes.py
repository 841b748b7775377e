"""Real processes over Gloo give the plain loop's losses and weights, bit by bit.

Replicas sum their own sums, so that the plain loop sums by replica there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from user_project import assert_same_weights, make_directory, plain_result, result

LAYOUTS = [  # schedule, pipeline, data, micro-batches, clipping, precision
    ("1f1b", 2, 1, 4, 0.05, "fp32"),
    ("gpipe", 1, 2, 7, None, "bf16"),
    *(
        pytest.param(*layout, marks=pytest.mark.slow)
        for layout in [
            ("1f1b", 3, 2, 4, 0.05, "fp32"),
            ("zb_v", 2, 1, 7, 0.05, "bf16"),
            ("varuna", 3, 1, 4, 0.05, "fp32"),
        ]
    ),
    *(
        pytest.param(*layout, marks=pytest.mark.full)
        for layout in [
            ("naive", 2, 2, 1, None, "fp32"),
            ("gpipe", 3, 1, 7, 0.05, "bf16"),
            ("interleaved_1f1b", 2, 2, 4, 0.05, "fp32"),
            ("1f1b", 4, 1, 7, None, "fp32"),
            ("naive", 4, 1, 4, 0.05, "bf16"),
            ("gpipe", 4, 2, 4, 0.05, "fp32"),
            ("1f1b", 2, 2, 7, 0.05, "bf16"),
            ("naive", 3, 1, 1, None, "bf16"),
            ("zb_h1", 4, 1, 4, 0.05, "fp32"),
        ]
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb_v", pytest.param("zb_h2", marks=pytest.mark.full)])
def test_post_validation_gives_the_same_bits(tmp_path: Path, schedule: str) -> None:
    """Some steps are clipped, and so are taken back; checkpoints lie between them."""
    overrides = [
        f"schedule={schedule}", "parallelism.pipeline=2", "schedule.microbatches=4", "data.kwargs.samples=21",
        "data.batch_size=8", "trainer.grad_clip_norm=0.9", "checkpoint.every=2", "schedule.post_validation=true",
    ]  # fmt: skip
    record, weights = result(make_directory(tmp_path), *overrides)
    losses, state = plain_result(samples=21, replicas=1, by_replica=True, count=4, clip_norm=0.9, dtype=torch.float32)
    assert record["loss"] == losses
    assert_same_weights(weights, state)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_pipelines_in_both_directions(tmp_path: Path, ranks: int) -> None:
    """The bits of the plain loop that sums each direction first; a checkpoint holds one copy, and goes on as either."""
    overrides = [
        f"parallelism.pipeline={ranks}", "schedule.microbatches=4", "data.kwargs.samples=21", "data.batch_size=8",
        "trainer.grad_clip_norm=0.05", "checkpoint.every=2", "checkpoint.keep=9", "schedule.twin_check_every=1",
    ]  # fmt: skip
    directory = make_directory(tmp_path)
    record, weights = result(directory, *overrides, "schedule=chimera")
    options: dict[str, Any] = {"samples": 21, "count": 4, "clip_norm": 0.05, "dtype": torch.float32}
    losses, state = plain_result(pipelines=2, **options)
    assert record["loss"] == losses
    assert_same_weights(weights, state)
    overrides.append("resume=run/checkpoints/step-2.ckpt")
    again, resumed = result(directory, *overrides, "schedule=chimera", run="again")
    assert again["loss"] == losses
    assert_same_weights(resumed, state)
    other, _ = result(directory, *overrides, "schedule=1f1b", run="other")
    assert other["loss"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(("schedule", "pipeline", "data", "count", "clip_norm", "precision"), LAYOUTS)
def test_equal(
    tmp_path: Path, schedule: str, pipeline: int, data: int, count: int, clip_norm: float | None, precision: str
) -> None:
    overrides = [
        f"schedule={schedule}", f"parallelism.pipeline={pipeline}", f"parallelism.data={data}",
        f"schedule.microbatches={count}", f"precision={precision}", "data.kwargs.samples=21", "data.batch_size=8",
    ]  # fmt: skip
    if clip_norm is not None:
        overrides.append(f"trainer.grad_clip_norm={clip_norm}")
    record, weights = result(make_directory(tmp_path), *overrides)
    losses, state = plain_result(
        samples=21,
        replicas=data,
        by_replica=True,
        count=count,
        clip_norm=clip_norm,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision],
    )
    assert record["loss"] == losses
    assert_same_weights(weights, state)
    assert record["status"] == "ok"
    assert record["layout"] == {"pipeline": pipeline, "data": data, "tensor": 1, "world_size": pipeline * data}
