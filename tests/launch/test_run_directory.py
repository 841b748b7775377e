"""The place of a run: found good or refused before anything is written, and never shared."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.launch.run.directory import (
    check_run_directory,
    create_run_directory,
    job_directory,
    run_directory_problems,
)
from runner.record import RunRecord


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_default_place_is_named_by_time_and_belongs_to_one_run(tmp_path: Path) -> None:
    assert run_directory_problems("demo", None) == []
    assert list(tmp_path.iterdir()) == []  # looking writes nothing
    made = [create_run_directory("demo", None) for _ in range(4)]
    assert len(set(made)) == 4
    assert all(path.is_dir() and path.parent == tmp_path / "outputs" / "demo" for path in made)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", made[0].name)


def test_a_chosen_place_is_made_with_its_parents_and_is_absolute(tmp_path: Path) -> None:
    assert create_run_directory("demo", "some/where") == tmp_path / "some" / "where"
    assert (tmp_path / "some" / "where").is_dir()


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    (problem,) = run_directory_problems(name, None)
    assert problem.path == "name"
    assert "one file name" in problem.line()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    (at,) = run_directory_problems("demo", "taken")
    (below,) = run_directory_problems("demo", "taken/run")
    assert (at.path, below.path) == ("run_dir", "run_dir")
    assert "must be a directory" in at.line()
    assert "taken is a file" in below.line()


def test_a_place_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    (problem,) = run_directory_problems("demo", "new/run")
    assert "must be writable" in problem.line()
    assert str(tmp_path) in problem.line()


def test_what_the_file_system_refuses_at_last_is_a_problem_too(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")
    with pytest.raises(RequestError, match="run_dir = .*must be writable"):
        create_run_directory("demo", None)


def test_an_earlier_run_is_not_overwritten_unless_it_is_continued(tmp_path: Path) -> None:
    RunRecord(status="ok").save(create_run_directory("demo", "old"))
    (problem,) = check_run_directory(RunConfig(run_dir="old"))
    assert "would be overwritten" in problem.line()
    assert check_run_directory(RunConfig(run_dir="old", resume="auto")) == []


def test_nor_is_an_earlier_sweep(tmp_path: Path) -> None:
    sweep = create_run_directory("demo", "sweep")
    assert job_directory(sweep, 0) == sweep / "0"
    assert run_directory_problems("demo", "sweep") == []
    RunRecord().save(sweep / "0")
    assert len(run_directory_problems("demo", "sweep")) == 1
