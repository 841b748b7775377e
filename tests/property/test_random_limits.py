"""``parallelism=auto`` under memory limits that are drawn: what is found keeps to its limit, and to its prediction."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import warm

from runner.cli.main import main
from runner.record import RunRecord

_NEAR = 65_536
"""Bytes that a peak may be below its prediction, besides a hundredth of it."""


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_a_plan_under_any_limit_is_kept(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(f"limits {seed}")
    monkeypatch.chdir(tmp_path)
    words = [
        *("model=gpt", f"data.batch_size={draw.choice((4, 8, 16))}", "device=cpu", "hardware=laptop_cpu"),
        *("parallelism=auto", f"parallelism.ranks={draw.choice((1, 2, 4))}", "parallelism.search=quick"),
        *("logger=none", "trainer.progress=false", "launcher.watchdog_seconds=null", "trainer.max_steps=2"),
        f"optimizer={draw.choice(('adamw', 'sgd', 'muon'))}",
    ]
    assert main(["plan", *words, "--json"]) == 0
    most = max(json.loads(capsys.readouterr().out)["peak_memory_bytes"])
    limit = int(most * draw.uniform(0.4, 1.0))
    status = main(["plan", *words, f"memory_limit={limit}", "--json"])
    found = json.loads(capsys.readouterr().out)
    if status == 3:  # the nearest layout needs so much
        limit = int(found["nearest"]["peak_memory_bytes"] * draw.uniform(1.0, 1.2)) + 1
        assert main(["plan", *words, f"memory_limit={limit}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("subprocess.Popen", warm.WarmRanks)
    assert main(["train", *found["request"], "run_dir=run"]) == 0
    measured = RunRecord.load(tmp_path / "run").peak_memory_bytes["measured"]
    counted = measured if isinstance(measured, list) else [measured]  # a number, of one rank
    for each, predicted in zip(counted, found["peak_memory_bytes"], strict=True):
        assert each <= predicted
        assert predicted <= limit
        assert predicted - each <= 0.01 * each + _NEAR, found["request"]
