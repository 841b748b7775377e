"""In a clone that is not installed, a command names the missing package and the line that installs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.cli.main import main


def test_a_missing_package_of_the_runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "hydra.core.override_parser.overrides_parser", None)
    monkeypatch.setitem(sys.modules, "hydra.errors", None)
    assert main(["schedule", "schedule=gpipe"]) == 1
    clone = Path(__file__).resolve().parents[2]
    assert capsys.readouterr().err == f"hydra is not installed. `pip install -e {clone}` installs what runner needs\n"


def test_a_missing_package_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_that_imports.py").write_text("import package_that_is_nowhere\n")
    assert main(["schedule", "schedule.target=mine_that_imports:order"]) == 2
    said = capsys.readouterr().err
    assert "No module named 'package_that_is_nowhere'" in said
    assert "pip install" not in said


def test_a_file_in_place_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_a_file.py").write_text("def order(ranks, microbatches): ...\n")
    assert main(["schedule", "schedule.target=mine_of_a_file.py:order"]) == 2
    assert capsys.readouterr().err.endswith("Try schedule.target=mine_of_a_file:order.\n")
