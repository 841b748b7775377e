"""The largest model that a plan lets train is, within 5 % of its width, the largest that the ranks have room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from zero_ranks import ALWAYS, train_all

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.profiling.model import profile_model

LIMIT = 8_000_000
STAGES = (0, 1, 2, 3)


def overrides(stage: Any, width: Any) -> Any:
    sizes = (f"model.kwargs.width={width}", "trainer.max_steps=3", f"memory_limit={LIMIT}")
    return ["model.target=zero_model:model", *sizes, "parallelism.data=2", f"zero.stage={stage}"]


def fits(stage: Any, width: Any) -> Any:
    config = resolve([*ALWAYS, *overrides(stage, width)])
    return make_plan(config, profile_model(config)).fits


def largest_width(stage: Any, low: int = 64, high: int = 512) -> Any:
    """By bisection: ``low`` fits, ``high`` does not."""
    assert fits(stage, low)
    assert not fits(stage, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(stage, middle) else (low, middle)
    return low


@pytest.mark.full
@pytest.mark.slow
def test_the_largest_width_that_trains_is_the_plans_within_5_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "profiles"))
    planned = {stage: largest_width(stage) for stage in STAGES}
    assert planned[0] < planned[1]
    around = {(stage, part): round(planned[stage] * part) for stage in STAGES for part in (0.95, 1.05)}
    unlimited = "memory_limit=1GB"  # a run over the limit would be refused
    runs = {f"{stage}_{part}": [*overrides(stage, width), unlimited] for (stage, part), width in around.items()}
    found = train_all(tmp_path, runs)
    peaks = {name: max(result.record["peak_memory_bytes"]["measured"]) for name, result in found.items()}
    assert {name: peak for name, peak in peaks.items() if (peak <= LIMIT) != name.endswith("0.95")} == {}
