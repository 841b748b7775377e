"""Of the reports of several ranks, the earliest is told, after all ranks have ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.api.failures import _at_exit, report_failure


def test_the_earliest_report_is_told_when_the_others_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runner_reports"
    folder.mkdir()
    monkeypatch.setenv("RUNNER_FAILURES", str(folder))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_failure(ValueError("the layer does not like its input"), 1)
    report_failure(ConnectionError("Connection closed by peer"), 0)
    other = subprocess.Popen(["true"])
    _at_exit([other], folder)
    assert other.poll() == 0, "it was waited for"
    assert capsys.readouterr().err == "\nrank 1 failed first: ValueError: the layer does not like its input\n"
    assert not folder.exists()


def test_without_a_report_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _at_exit([], tmp_path)
    assert capsys.readouterr().err == ""
    assert not tmp_path.exists()
