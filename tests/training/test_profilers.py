"""Profilers by name, and loggers of services whose package is missing."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
from user_project import make_directory, train

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.training.loggers import build_profiler


def test_nvtx_ranges_need_a_gpu(tmp_path: Path) -> None:
    config = dataclasses.replace(resolve(["model=mlp", "profiler=nvtx"]), device="cpu")
    with pytest.raises(RequestError, match="profiler = nvtx: needs a CUDA device. Try profiler=pytorch."):
        build_profiler(config, tmp_path)


@pytest.mark.slow
def test_python_functions_are_profiled_on_every_rank(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    done = train(directory, "profiler=cprofile", "parallelism.pipeline=2", "checkpoint=none")
    assert done.returncode == 0, done.stderr
    reports = sorted((directory / "run").glob("fit-profile-*"))
    assert len(reports) == 2
    assert all("cumulative" in report.read_text(encoding="utf-8") for report in reports)


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="mlflow is installed")
def test_a_logger_without_its_package_is_refused(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    done = train(directory, "logger=mlflow")
    assert done.returncode == 2
    assert "logger = mlflow: needs mlflow, which is not installed. Try pip install mlflow." in done.stderr
    assert not (directory / "run").exists()
