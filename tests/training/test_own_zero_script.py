"""ZeRO from a user's own script is refused where ``runner train`` refuses it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from runner.api import OffloadConfig, ZeroConfig, ZeroStrategy
from runner.errors import RequestError


@pytest.mark.parametrize(
    ("zero", "offload", "layout", "trainer", "path"),
    [
        ({}, {}, {}, {}, "zero.stage"),
        ({"stage": 3}, {}, {"stages": 2}, {}, "zero.stage"),
        ({"stage": 1}, {"parameters": "cpu"}, {}, {}, "offload.parameters"),
        ({"stage": 2}, {"optimizer": "cpu"}, {}, {"precision": "bf16-true"}, "offload.optimizer"),
        ({"stage": 2}, {"optimizer": "cpu", "delay_from": 1}, {}, {}, "offload.delay_from"),
        ({"stage": 2}, {}, {}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "trainer.grad_clip_val"),
        ({"stage": 1}, {}, {"stages": 2, "schedule": "zb_h1", "microbatches": 4}, {}, "schedule.name"),
    ],
)
def test_refused_before_anything_starts(
    zero: dict[str, Any], offload: dict[str, Any], layout: dict[str, Any], trainer: dict[str, Any], path: str
) -> None:
    strategy = ZeroStrategy(ZeroConfig(**zero), OffloadConfig(**offload), **layout)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "barebones": False,
    }
    fitting = pl.Trainer(strategy=strategy, devices=1, accelerator="cpu", max_epochs=1, **quiet, **trainer)
    with pytest.raises(RequestError) as refused:
        strategy.require_possible(fitting)
    assert path in str(refused.value)
