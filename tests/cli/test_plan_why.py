"""``runner plan --why`` and ``--rules``: which rules there are, and which looked at a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.cli.main import main
from runner.plan.rules.document import all_tables

SMALL = ("model=mlp", "data.batch_size=8", "device=cpu")


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_rules_as_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--rules")
    assert len(found) == sum(len(table.rules) for table in all_tables())
    assert all(set(rule) == {"group", "path", "rule", "why", "source"} for rule in found)
    (ratio,) = [rule for rule in found if rule["rule"] == "must be 1 with offload.delay_from"]
    assert (ratio["group"], ratio["path"]) == ("ZeRO and offload", "offload.ratio")
    assert ratio["source"].startswith("deepspeed/runtime/zero/stage3.py")


def test_all_rules_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    groups = [line for line in lines if line and not line.startswith(" ")]
    assert groups == [table.title for table in all_tables()]
    assert "  seed: must lie in [0, 2^32). NumPy takes no other seed" in lines
    assert any("with optimizer={optimizer.name}" in line for line in lines)
    assert not any("{order." in line or "{config." in line for line in lines)


def test_all_rules_take_no_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rules", "seed=1"]) == 2
    assert "flag = --rules: prints all rules and takes no request" in capsys.readouterr().err


@pytest.mark.costly
def test_why_a_plan_is_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, *SMALL, "zero.stage=1", "parallelism.data=2", "--why")
    why = plan["why"]
    assert why["reasons"] == plan["advice"]
    assert why["deepspeed"]["zero_optimization"]["stage"] == 1
    paths = [rule["path"] for rule in why["rules"]]
    assert "schedule.post_validation" in paths
    assert "offload.ratio" not in paths, "nothing of it was named, and ZeRO 1 does not ask for it"
    assert all(set(rule["read"]) <= {"zero.stage", "parallelism.data", "data.batch_size"} for rule in why["rules"])
    assert "why" not in document(capsys, *SMALL)


def test_why_is_told_below_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "compile=true", "--why"]) == 0
    plan, _, why = capsys.readouterr().out.partition(" rules bind ")
    assert "fits:" in plan
    assert why.startswith("model, data.batch_size, device, compile; all of them hold")
    assert "  compile: must be false with zero.stage=1, 2 or 3. " in why
    assert "DeepSpeed's configuration" not in why


@pytest.mark.costly
def test_why_of_every_job_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = document(capsys, *SMALL, "-m", "compile=true,false", "--why")
    assert [rule["path"] for rule in first["why"]["rules"]].count("compile") >= 2
    assert second["why"]["rules"] == first["why"]["rules"]
