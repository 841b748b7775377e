"""Profiles are found again by what they depend on."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from plan_profiles import model as made_up

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.profile import ModelProfile
from runner.profiling.cache import cached_profile


def test_a_profile_is_measured_once_whatever_else_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    measured = []

    def measure(config: RunConfig) -> ModelProfile:
        measured.append(config.seed)
        return made_up([])

    for module in ("runner.profile", "runner.recipes.benchmarks.rounds", "runner.report.write"):
        importlib.import_module(module)
        cached_profile(resolve(["model=mlp"]), measure)
    cached_profile(resolve(["model=mlp", "seed=1"]), measure)
    assert measured == [0, 1]
