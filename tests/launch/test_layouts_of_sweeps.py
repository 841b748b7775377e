"""Jobs of a sweep that leave their layout to the runner: each finds one, keeps it, and trains as anybody's request."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from launch_helpers import HERE
from light_job import STARTS

from runner.cli.main import main
from runner.config.compose.resolve import load, resolve
from runner.launch.hydra.array import array_problems
from runner.launch.sweep import jobs as sweep_jobs
from runner.launch.sweep.jobs import Request
from runner.record import RunRecord
from runner.report import read_report
from runner.report.tables import runs_table

WORDS = ("model=mlp", "device=cpu", "hardware=laptop_cpu", "data.batch_size=8", "logger=none", "trainer.progress=false")
AUTO = ("parallelism=auto", "parallelism.search=quick")


def start(*overrides: str) -> int:
    return main(["train", "-m", *WORDS, "run_dir=s", *overrides])


def records(directory: Path) -> list[RunRecord]:
    return [run.record for run in read_report(directory / "s").runs]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def light(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, where sweeps have light jobs, which find nothing."""
    monkeypatch.setattr(sweep_jobs, "JOB_MODULE", "light_job")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", ""), str(HERE.parents[1])])
    )
    return place


@pytest.mark.costly
def test_each_job_finds_its_layout_and_trains_as_its_request_does(place: Path) -> None:
    """One searches beside a pipeline that is named, and one says its layout: both learn the same to the last bit."""
    steps = ("trainer.max_steps=3", "schedule.microbatches=2")
    assert main(["train", *WORDS, *steps, "run_dir=plain"]) == 0
    words = ("parallelism.pipeline=2", "parallelism.data=1", "parallelism.search=quick", "sweep_on_failure=stop")
    assert start("parallelism=auto,single", *words, *steps) == 0
    made = records(place)
    assert [record.status for record in made] == ["ok"] * 2
    assert {tuple(record.loss) for record in made} == {tuple(RunRecord.load(place / "plain").loss)}
    assert [record.layout["pipeline"] for record in made] == [2, 2]
    assert "found_words" not in made[1].extras
    typed = made[0].extras["found_words"]
    assert not any(word.startswith(("parallelism=", "parallelism.search", "run_dir", "sweep_")) for word in typed)
    ran = load(place / "s" / "0" / "config.yaml")
    assert replace(resolve(typed), run_dir=ran.run_dir, sweep_on_failure="stop") == ran
    table = runs_table(read_report(place / "s"))
    chosen = table.header.index("chosen")
    assert [row[chosen] == "-" for row in table.rows] == [False, True]


@pytest.mark.costly
def test_what_does_not_fit_is_a_row_of_its_own(place: Path) -> None:
    assert start(*AUTO, "parallelism.ranks=1", "memory_limit=1kB") == 1
    (made,) = records(place)
    assert made.status == "out_of_memory"
    assert str(made.reason).startswith("no layout of ")
    assert "found_words" not in made.extras


@pytest.mark.costly
def test_a_layout_that_was_found_is_not_searched_again(light: Path) -> None:
    """A job that was cut after its search goes on with the layout of then, whatever else is asked for now."""
    assert start(*AUTO, "parallelism.ranks=2", "seed=1,2") == 0
    cut = RunRecord.load(light / "s" / "0")
    assert load(light / "s" / "0" / "config.yaml").parallelism.name == "auto"
    words = [word for word in cut.extras["asked_words"] if not word.startswith("parallelism")]
    found = [*words, "parallelism.pipeline=2", "schedule=gpipe", "schedule.microbatches=2"]
    cut.replace(status="interrupted", extras=cut.extras | {"found_words": found}).save(light / "s" / "0")
    assert start(*AUTO, "parallelism.ranks=2", "seed=1,2", "checkpoint.keep=7") == 0
    starts = [(light / "s" / number / STARTS).read_text().splitlines() for number in ("0", "1")]
    assert [len(each) for each in starts] == [2, 1]
    config = load(light / "s" / "0" / "config.yaml")
    assert (config.parallelism.name, config.parallelism.pipeline, config.schedule.name) == ("single", 2, "gpipe")
    assert (config.checkpoint.keep, config.run_dir) == (7, str(light / "s" / "0"))
    rows = runs_table(read_report(light / "s")).rows
    assert [row[2] for row in rows] == ["pipeline=2 schedule=gpipe microbatches=2", "-"]


def test_a_job_is_known_by_what_its_search_may_not_change() -> None:
    def key(*more: str) -> str:
        words = (*WORDS, *AUTO, *more)
        return Request(words, resolve(words)).key

    plain = key()
    assert key("run_dir=other") == plain
    assert key("schedule.microbatches=1") != plain  # the value that the request has, but named
    assert key("parallelism.ranks=2") != plain
    single = (*WORDS, "schedule.microbatches=1")
    assert Request(single, resolve(single)).key == Request(WORDS, resolve(WORDS)).key


@pytest.mark.costly
def test_mistakes_of_a_job_are_told_before_the_first_starts(light: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(*AUTO, "parallelism.ranks=2", "schedule=1f1b,pipedream") == 0
    line = "schedule = pipedream: must be a flushed order of its own with parallelism=auto"
    told = capsys.readouterr().err
    assert told.index(f"1 of 2 jobs cannot be run: {line}") < told.index("job 0, 1 of 2 to run")
    assert [record.status for record in records(light)] == ["ok", "unsupported"]
    assert str(records(light)[1].reason).startswith(line)
    assert not (light / "s" / "1" / STARTS).exists()


@pytest.mark.parametrize("command", ["train", "plan"])
def test_where_no_job_can_be_searched_nothing_is_written(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "-m", *WORDS, *AUTO, "run_dir=s", "schedule=pipedream", "parallelism.ranks=0,-1"]) == 2
    told = capsys.readouterr().err
    for line in (
        "parallelism.ranks = 0: must be at least 1",
        "parallelism.ranks = -1",
        "schedule = pipedream: must be",
    ):
        assert line in told
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        (["--rehearse"], "flag = --rehearse: takes plans whose layout is known"),
        (["--write", "found.yaml"], "--write = found.yaml: takes one plan"),
    ],
)
def test_a_sweep_of_plans_refuses_what_it_cannot_do_with_searched_ones(
    flag: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-m", *WORDS, "parallelism=auto,single", *flag]) == 2
    assert line in capsys.readouterr().err


def test_an_array_refuses_jobs_whose_ranks_are_not_known() -> None:
    config = resolve([*WORDS, *AUTO])
    (problem,) = array_problems({"nodes": 1, "gpus_per_node": None, "tasks_per_node": 1}, [config])
    assert problem.line().startswith("parallelism = auto: cannot be combined with hydra/launcher")


@pytest.mark.costly
def test_plans_of_a_sweep_name_a_directory_each(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", *WORDS, *AUTO, "parallelism.ranks=1", "seed=0,1", "run_dir=s", "--json"]) == 0
    requests = [document["request"] for document in json.loads(capsys.readouterr().out)]
    assert [word for request in requests for word in request if word.startswith("run_dir")] == [
        "run_dir=s/0", "run_dir=s/1"
    ]  # fmt: skip
