"""A pipeline of unlike devices trains as one process does, with the order and the cut that its plan chose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import thread_runs
import torch

from runner.engine import context
from runner.plan.values import RunPlan

CLASSES = "hardware.devices=[{name: slow, speed: 0.25},{name: fast, speed: 1}]"
# No measured second decides the cut, and no latency, beside which layers as small as these take no time.
NAMED = ("hardware=laptop_cpu", "hardware.link_latency_seconds=0")


@pytest.mark.parametrize("words", [("parallelism.devices=[slow,fast]",), ("schedule=zb_h1",)], ids=" ".join)
def test_it_is_one_process(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "time", SimpleNamespace(sleep=lambda seconds: None))
    shape = ("schedule.microbatches=4", "parallelism.pipeline=2")
    one, weights = thread_runs.result(tmp_path, "schedule.microbatches=4", "parallelism.pipeline=1", run="one")
    made, others = thread_runs.result(tmp_path, *shape, *NAMED, CLASSES, *words, run="unlike")
    plan = RunPlan.load(tmp_path / "unlike")
    sizes = {each.name: last - first for each, (first, last) in zip(plan.devices, plan.partition, strict=True)}
    assert sorted(sizes) == ["fast", "slow"]
    assert sizes["slow"] <= sizes["fast"]
    assert made["loss"] == one["loss"]
    assert all(torch.equal(others[name], value) for name, value in weights.items())
