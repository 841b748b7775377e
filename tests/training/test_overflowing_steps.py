"""Steps whose gradients overflow: their bytes, and what a record says of them."""

from __future__ import annotations

from pathlib import Path

import torch
from thread_runs import result
from torch import nn
from torch.utils.data import TensorDataset

_WIDTH = 96


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 3))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(50 * torch.randn(16, _WIDTH, generator=generator), torch.arange(16) % 3)


_WORDS = (
    f"model.target={__name__}:build", f"data.target={__name__}:samples", "loss=cross_entropy", "data.batch_size=8",
    "device=cpu", "trainer.max_steps=3", "checkpoint=none", "logger=none", "precision=fp16_mixed",
)  # fmt: skip


def test_a_step_that_overflows_holds_no_more_than_another(tmp_path: Path) -> None:
    """Whether gradients are finite was asked of each element, in a copy as large as they are."""
    made, _ = result(tmp_path, words=(*_WORDS, "optimizer=sgd"))
    assert made["skipped_steps"]
    (counted,), (predicted,) = made["peak_memory_bytes"]["measured"], made["peak_memory_bytes"]["predicted"]
    assert counted <= predicted <= 1.01 * counted


def test_a_step_that_post_validation_takes_back_is_recorded_as_skipped(tmp_path: Path) -> None:
    words = ("parallelism.pipeline=2", "schedule.microbatches=4", "schedule=zb_h2", "schedule.post_validation=true")
    made, _ = result(tmp_path, words=(*_WORDS, *words))
    assert made["loss_scale"] == 65536.0 / 2 ** len(made["skipped_steps"]) < 65536.0
