"""``runner doctor``: one row per thing, with a fix where it is missing."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.launch import doctor
from runner.launch.doctor import PYTHON, VERSIONS, Check, examine

ROOT = Path(__file__).resolve().parents[2]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_the_versions_are_the_packages_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == PYTHON
    for package, supported in VERSIONS.items():
        assert f"{package}{supported}" in project["dependencies"]


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    rows = {row["name"]: row for row in document["checks"]}
    assert {"python", *VERSIONS, "cpu", "memory", "disk", "gloo", "cuda", "deepspeed", "libaio", "slurm"} <= rows.keys()
    assert rows["gloo"]["status"] == "ok"
    for row in rows.values():
        assert row["found"]
        assert bool(row["fix"]) is (row["status"] == "missing")
        assert "\n" not in row["fix"]


def test_what_is_missing_is_told_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: {"torch": "2.10.0", "lightning": "2.6.6"}.get(package))
    monkeypatch.setattr(doctor, "_gloo", lambda: [])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    monkeypatch.setattr(doctor, "_cgroup_limit", lambda: 1_000_000_000)
    found = by_name(examine(tmp_path))
    assert found["lightning"].ok
    assert (found["torch"].ok, found["torch"].fix) == (False, 'pip install "torch>=2.11,<2.14"')
    assert found["torch"].found == "2.10.0, supported is >=2.11,<2.14"
    assert found["omegaconf"].found.startswith("not installed")
    assert not found["disk"].ok
    assert found["memory"].found == "1.0 GB (limit of the control group)"
    assert found["default recipe"].fix == "pip install emoji emosvg resvg-py pillow"
    assert found["deepspeed"].fix
    assert main(["doctor"]) == 1
    assert "something that training needs is missing" in capsys.readouterr().out


def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_RANK", "import sys; sys.exit('RuntimeError: no route to host')")
    (row,) = doctor._gloo()
    assert (row.ok, row.found) == (False, "RuntimeError: no route to host")
    assert "GLOO_SOCKET_IFNAME" in row.fix
