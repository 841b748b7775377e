"""``runner plan --from``: a run's measured steps, put onto the plan of its request with other words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.launch.run.projection import MeasuredRun, measured_run
from runner.plan.values import RunPlan
from runner.record import RunRecord


def ran() -> MeasuredRun:
    """A run of 10 ms a step, 2 ms of it beside the schedule, of which its plan promised 4 ms: twice as long."""
    config = {"model": {"target": resolve(["model=mlp"]).model.target}, "hardware": {"name": "auto"}}
    record = RunRecord(command="runner train model=mlp data.batch_size=8 parallelism.pipeline=2 'run_dir=old run'")
    steps = {"all": [0.008, 0.010, 0.014], "p10": 0.008, "median": 0.010, "p90": 0.014}
    parts = {"data": 0.0005, "callbacks": 0.001, "rest": 0.0005, "compute": 0.006, "bubble": 0.002}
    return MeasuredRun(Path("old"), record.replace(config=config, step_seconds=steps, seconds=parts), 0.004)


def plan_of(seconds: float, source: str = "measured") -> RunPlan:
    made: Any = SimpleNamespace(
        time=SimpleNamespace(step_seconds=seconds), profile=SimpleNamespace(seconds_source=source)
    )
    return cast(RunPlan, made)


def test_the_schedule_is_scaled_and_what_is_beside_it_stays() -> None:
    found = ran().projection(plan_of(0.003), resolve(["model=mlp"]))
    assert [found.ratio, found.fixed_seconds] == pytest.approx([2.0, 0.002])
    assert [found.low, found.seconds, found.high] == pytest.approx([0.0065, 0.008, 0.011])
    assert ran().projection(plan_of(0.004), resolve(["model=mlp"])).seconds == pytest.approx(0.010)


def test_other_words_replace_the_runs_own() -> None:
    assert ran().words(["parallelism.pipeline=4", "seed=1"]) == (
        "model=mlp", "data.batch_size=8", "parallelism.pipeline=4", "seed=1",
    )  # fmt: skip


def test_the_job_of_a_sweep_has_its_own_words_and_a_script_has_none() -> None:
    one = ran()
    swept = replace(one.record, command="runner train seed=1,2 -m", extras={"overrides": ["model=mlp", "seed=2"]})
    assert replace(one, record=swept).words(["device=cpu"]) == ("model=mlp", "seed=2", "device=cpu")
    with pytest.raises(RequestError, match=r"must be a run of runner train.*train\.py"):
        replace(one, record=replace(one.record, command="python train.py")).words([])


@pytest.mark.parametrize("word", ["parallelism=auto", "-m"])
def test_a_search_or_a_sweep_of_projections_is_refused(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runner.launch.run.projection.measured_run", lambda _: ran())
    assert main(["plan", "--from", "old", word]) == 2
    assert "takes one plan, whose layout is known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "words", "told"),
    [
        (plan_of(0.003), ["model=gpt"], "model.target = "),
        (plan_of(0.003), ["model=mlp", "hardware=a100_80gb"], "hardware.name = a100_80gb"),
        (plan_of(0.003, "estimated"), ["model=mlp"], "needs layers that are measured"),
    ],
)
def test_another_model_or_machine_is_refused(plan: RunPlan, words: list[str], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        ran().projection(plan, resolve(words))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="must be a run's directory"):
        measured_run(tmp_path)


@pytest.mark.costly
def test_a_run_projected_to_itself_is_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=mlp", "data.batch_size=8", "device=cpu", "trainer.max_steps=6", "logger=none"]
    assert main(["train", *words, "run_dir=run"]) == 0
    capsys.readouterr()
    assert main(["plan", "--from", "run", "--json", "--why"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["why"]["layout"]
    record = RunRecord.load(Path("run"))
    share = found["step_seconds"] / RunPlan.load(Path("run")).time.step_seconds
    fixed = found["projected"]["fixed_seconds"]
    expected = (record.step_seconds["median"] - fixed) * share + fixed
    assert found["projected"]["step_seconds"]["median"] == pytest.approx(expected)
    assert main(["plan", "--from", "run", "data.batch_size=16"]) == 0
    assert "projected from run: " in capsys.readouterr().out
