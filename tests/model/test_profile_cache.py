"""Profiles are found again by what they depend on."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from plan_profiles import layer
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


def test_a_profile_serves_all_pipelines_that_it_has_layers_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    measured = []

    def measured_for(*words: str) -> list[tuple[int, int]]:
        def measure(config: RunConfig) -> ModelProfile:
            measured.append((config.parallelism.pipeline, config.parallelism.data))
            return made_up([layer()] * 4, cut_finely=config.parallelism.pipeline == 3)

        before = len(measured)
        cached_profile(resolve(["model=mlp", "data.batch_size=16", *words]), measure)
        return measured[before:]

    assert measured_for("parallelism.pipeline=1", "schedule.microbatches=8") == [(1, 1)]
    assert measured_for("parallelism.pipeline=3", "schedule.microbatches=8") == [(3, 1)]
    assert measured_for("parallelism.pipeline=4", "schedule.microbatches=8") == [(4, 1)]
    assert measured_for("parallelism.pipeline=2", "schedule.microbatches=8") == []
    assert measured_for("parallelism.pipeline=2", "parallelism.data=2", "schedule.microbatches=4") == []
    assert measured_for("parallelism.pipeline=4", "schedule=interleaved_1f1b", "schedule.microbatches=8") == [(4, 1)]
    assert measured_for("parallelism.pipeline=4", "schedule=interleaved_1f1b", "schedule.microbatches=8") == []
    assert measured_for("parallelism.pipeline=2", "parallelism.data=2", "schedule.microbatches=8") == [(2, 2)]
    assert measured_for(
        "parallelism.pipeline=2", "parallelism.data=2", "schedule.microbatches=4", "compression=fp16"
    ) == [(2, 2)]  # whose bytes follow the replicas
