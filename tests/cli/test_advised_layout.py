"""A request that does not fit, and that no single change helps: the layout that is advised fits as it is printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from plan_command import gpt, in_own_place

from runner.cli.main import main
from runner.errors import EXIT_DOES_NOT_FIT
from runner.profiling.model import _profile_model, samples_of

ASKED = (*gpt(layers=4), "parallelism.data=2", "schedule.microbatches=2")


@pytest.fixture(autouse=True)
def _own_place(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_own_place(tmp_path_factory, tmp_path, monkeypatch)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main(["plan", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.costly
def test_several_changes_at_once_are_found_and_fit_as_they_are_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    limit = "memory_limit=300kB"
    status, plan = planned(capsys, *ASKED, limit)
    (line,) = plan["problems"]
    assert (status, plan["fits"]) == (EXIT_DOES_NOT_FIT, False)
    assert "no single change makes it fit, but a search of" in line
    request = line.rpartition("Try runner train ")[2].removesuffix(".")
    assert set(ASKED[:-2]) < set(words := shlex.split(request))  # everything that is no layout stays
    status, found = planned(capsys, *words)
    assert (status, found["fits"]) == (0, True)
    assert max(found["peak_memory_bytes"]) <= 300_000 < max(plan["peak_memory_bytes"])
    assert main(["train", *ASKED, limit, f"run_dir={tmp_path / 'run'}"]) == EXIT_DOES_NOT_FIT
    assert f"Try runner train {' '.join(words[:2])}" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.costly
def test_a_search_profiles_each_way_to_divide_layers_once_for_each_size(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    profiled = mock.Mock(wraps=_profile_model)
    monkeypatch.setattr("runner.profiling.model._profile_model", profiled)
    planned(capsys, *ASKED[:-2], "parallelism.pipeline=4", "schedule.microbatches=8", "memory_limit=200kB")
    requests = [call.args[1] for call in profiled.call_args_list]
    kinds = [
        (each.precision.name, each.parallelism.tensor, each.parallelism.pipeline > 1, samples_of(each))
        for each in requests
    ]
    assert len(kinds) == len(set(kinds)) > 1


@pytest.mark.costly
def test_what_was_searched_in_vain_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    status, plan = planned(capsys, *gpt(layers=1), *ASKED[-2:], "memory_limit=10kB")
    (line,) = plan["problems"]
    assert status == EXIT_DOES_NOT_FIT
    assert "layouts of up to 16 ranks found none that fits either: the nearest needs" in line
