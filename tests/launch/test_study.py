"""A study by Optuna: its journal lets it go on, and its pruner ends trials that fall behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_helpers import HERE
from light_job import STARTS

from runner.cli.main import main
from runner.launch.hydra.journal import JOURNAL_FILE, Journal
from runner.launch.hydra.pruner import PRUNED_FILE, split_pruner
from runner.launch.hydra.pruning import Pruning
from runner.launch.hydra.space import choices_of, space_of, split_searched
from runner.launch.sweep import jobs as sweep_jobs
from runner.record import RunRecord
from runner.report import read_report

optuna = pytest.importorskip("optuna")
TINY = ("model=mlp", "data.batch_size=8", "logger=none", "trainer.progress=false")
SEARCH = ("hydra/sweeper=optuna", "optimizer.lr=interval(0.1,0.9)", "seed=choice(0,1)", "hydra.sweeper.n_jobs=2")


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, where the jobs of sweeps are light: a job's loss is its rate."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_jobs, "JOB_MODULE", "light_job")
    path = [str(HERE), os.environ.get("PYTHONPATH", ""), str(HERE.parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return tmp_path / "s"


def start(*words: str) -> int:
    return main(["train", "-m", *TINY, "run_dir=s", *SEARCH, *words])


def rates(sweep: Path) -> list[float]:
    return [run.record.config["optimizer"]["lr"] for run in read_report(sweep).runs]


def starts(sweep: Path) -> list[int]:
    return [len((sweep / run.name / STARTS).read_text().splitlines()) for run in read_report(sweep).runs]


@pytest.mark.costly
def test_a_study_with_a_seed_goes_on(light: Path) -> None:
    """The second start asks for the two trials that are missing, and for no value that it has asked for."""
    words = ["hydra.sweeper.sampler.seed=3"]
    assert start("hydra.sweeper.n_trials=2", *words) == 0
    first = rates(light)
    assert start("hydra.sweeper.n_trials=4", *words) == 0
    assert rates(light)[:2] == first
    assert len(set(rates(light))) == 4
    assert starts(light) == [1] * 4
    best = yaml.safe_load((light / "optimization_results.yaml").read_text())
    assert best["best_value"] == min(rates(light)) == best["best_params"]["optimizer.lr"]
    assert start("hydra.sweeper.n_trials=4", *words) == 0
    assert starts(light) == [1] * 4


def test_a_trial_that_was_cut_is_asked_for_first(light: Path) -> None:
    assert start("hydra.sweeper.n_trials=2") == 0
    journal = light / JOURNAL_FILE
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line.get("state") for line in lines] == [None, None, "complete", "complete"]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]) + '{"number": 1, "st')
    assert start("hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1") == 0
    assert len(rates(light)) == 2  # the same job, which is done
    assert [one.state for one in Journal(light).trials.values()] == ["complete", "complete"]


def test_trials_that_fail_end_the_study_and_are_tried_again_where_that_is_asked_for(light: Path) -> None:
    words = ("optimizer.lr=choice(15)", "seed=0", "hydra.sweeper.n_trials=1", "hydra.sweeper.n_jobs=1")
    assert start(*words) == 1
    assert [one.state for one in Journal(light).trials.values()] == ["fail"]
    assert start(*words) == 0  # nothing is missing
    assert starts(light) == [1]
    assert start(*words, "sweep_retry=failed", "hydra.sweeper.max_failure_rate=1.0") == 0
    assert starts(light) == [2]


@pytest.mark.costly
def test_a_grid_is_searched_once(light: Path) -> None:
    words = ["hydra.sweeper.n_trials=4", "hydra/sweeper/sampler=grid", "optimizer.lr=choice(0.1,0.2)"]
    assert start(*words) == 0
    assert sorted(rates(light)) == [0.1, 0.1, 0.2, 0.2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hydra.sweeper.direction=[minimize,maximize]"], "hydra.sweeper.direction = "),
        (["hydra.sweeper.pruner=medain"], "must be one of median, percentile. Try hydra.sweeper.pruner=median."),
        (["hydra.sweeper.pruner=median"], "needs trainer.val_every"),
        (["hydra.sweeper.pruner.n_startup_trials=1"], "must name a pruner"),
        (["hydra.sweeper.pruner=median", "hydra.sweeper.pruner.nothing=1"], "must be arguments of optuna.pruners."),
        (["hydra/sweeper/sampler=grid"], "needs values that can be counted"),
        (["hydra/sweeper/sampler=tep"], "Try hydra/sweeper/sampler=tpe."),
        (["hydra.sweeper.sampler.sed=1"], "Try hydra.sweeper.sampler.seed=1."),
        (["hydra/sweeper/sampler=qmc", "hydra.sweeper.sampler.qmc_type=nothing"], "must be arguments of the sampler"),
        (["hydra.sweeper.n_trials=0"], "must be at least 1"),
        (["hydra.sweeper.n_trials=many"], "cannot be set so"),
        (["hydra.sweeper.storage=sqlite:///study.db"], "has no meaning here"),
    ],
)
def test_what_no_study_can_do_is_refused(light: Path, words: list[str], told: str, capsys: Any) -> None:
    assert start(*words) == 2
    assert told in capsys.readouterr().err
    assert not light.exists()


def test_dimensions_are_asked_as_they_are_written() -> None:
    words = ["a=choice(x,y)", "b=range(0,8,2)", "c=int(interval(1,4))", "d=tag(log,interval(1e-5,1e-2))", "e=1,2"]
    found, plain = split_searched([*words, "f=1", "model=mlp"])
    assert (found, plain) == (words, ["f=1", "model=mlp"])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    asked = []
    for _ in range(20):
        trial = study.ask()
        asked.append({name: ask(trial) for name, ask in space_of(words).items()})
    assert {one["a"] for one in asked} == {"x", "y"}
    assert {one["b"] for one in asked} == {0, 2, 4, 6}
    assert {one["c"] for one in asked} == {1, 2, 3, 4}
    assert {one["e"] for one in asked} == {"1", "2"} or {one["e"] for one in asked} == {1, 2}
    assert sum(1e-5 <= one["d"] <= 1e-3 for one in asked) > 8  # two of three decades
    assert choices_of(["b=range(0,8,2)"]) == {"b": [0, 2, 4, 6]}


def test_a_trial_behind_the_others_is_ended(tmp_path: Path) -> None:
    """After two validations it is compared with the median of the three complete trials, one of them pruned."""
    for number, factor in enumerate([1.0, 2.0, 3.0, 0.0]):
        values = [[10.0, factor], [20.0, factor / 2]]
        RunRecord(status="ok", val_loss=values).save(_made(tmp_path / str(number)))
    (tmp_path / "3" / PRUNED_FILE).touch()
    RunRecord(status="running", val_loss=[[10.0, 0.0]]).save(_made(tmp_path / "4"))
    job = _made(tmp_path / "5")
    least = Pruning("median", {"n_startup_trials": 3})
    assert least.should_prune(job, {10: 2.5})
    assert not least.should_prune(job, {10: 1.5})
    assert least.should_prune(job, {10: 2.5, 20: 1.4})
    most = Pruning("median", {"n_startup_trials": 3}, "maximize")
    assert most.should_prune(job, {10: 1.5})
    assert not Pruning("median", {"n_startup_trials": 4}).should_prune(job, {10: 2.5})


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_the_words_of_a_pruner() -> None:
    pruner, others = split_pruner(["hydra.sweeper.pruner=median", "hydra.sweeper.pruner.n_warmup_steps=3", "a=b"])
    assert others == ["a=b"]
    assert pruner.options == {"n_warmup_steps": 3}
    assert (
        pruner.words("minimize")[1]
        == "callbacks.pruning.kwargs={name:median,options:{n_warmup_steps:3},direction:minimize}"
    )
