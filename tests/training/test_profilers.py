"""Profilers by name, and loggers of services whose package is missing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from user_project import make_directory, train

from runner.cli.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nvtx_ranges_without_a_gpu_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "model=mlp", "profiler=nvtx"]) == 2
    assert "profiler = nvtx: must be another here." in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.costly
def test_python_functions_are_profiled_on_every_rank(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    done = train(directory, "profiler=cprofile", "parallelism.pipeline=2", "checkpoint=none")
    assert done.returncode == 0, done.stderr
    reports = sorted((directory / "run" / "profiler").glob("fit-profile-*"))
    assert len(reports) == 2
    assert re.search(r"^profiler +run/profiler$", done.stdout, re.MULTILINE), "and is told where they are"
    assert all("cumulative" in report.read_text(encoding="utf-8") for report in reports)


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="mlflow is installed")
def test_a_logger_without_its_package_is_refused(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    done = train(directory, "logger=mlflow")
    assert done.returncode == 2
    assert "logger = mlflow: needs mlflow, which is not installed. Try pip install mlflow." in done.stderr
    assert not (directory / "run").exists()
