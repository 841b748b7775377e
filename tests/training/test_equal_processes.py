"""Real processes over Gloo give the plain loop's losses and weights, bit by bit.

Replicas sum their own sums, so that the plain loop sums by replica there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from user_project import assert_same_weights, make_directory, plain_result, result

LAYOUTS = [  # schedule, pipeline, data, micro-batches, clipping, precision
    ("1f1b", 3, 2, 4, 0.05, "fp32"),
    ("gpipe", 1, 2, 7, None, "bf16"),
    ("zb_v", 2, 1, 7, 0.05, "bf16"),
]


@pytest.mark.costly
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
