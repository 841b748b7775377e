"""The benchmarks run, compute the same on all sides, and say what they measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from runner.recipes.benchmarks import (
    checkpoints,
    jitter,
    one_process,
    prediction,
    sleeping_stages,
    two_stages,
    zero,
)
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.result import figure, publish
from runner.recipes.benchmarks.rounds import take_turns
from runner.recipes.benchmarks.workload import GptSize

SMALL = GptSize(layers=2, width=16, sequence_length=8, vocab_size=20, heads=2)


def test_contestants_take_turns_and_the_first_rounds_do_not_count():
    calls: list[str] = []
    contestants = {name: partial(calls.append, name) for name in "ab"}
    seconds = take_turns(contestants, warm_rounds=1, rounds=2, steps=2, meet=lambda: calls.append("|"))
    assert "".join(calls) == "|aa||bb|" * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_a_figure_is_judged_by_its_median():
    assert figure("x", [0.9, 1.5, 1.0], target=1.0).verdict == "met"
    assert figure("x", [0.9, 1.5, 1.1], target=1.0).verdict == "missed"
    assert figure("x", [2.0]).verdict == ""


def test_other_losses_are_no_comparison():
    with pytest.raises(RuntimeError, match="torch computes other losses"):
        two_stages.require_equal({"runner": [1.0, 2.0], "torch": [1.0, 2.1]})


def test_the_result_names_hardware_versions_and_date(tmp_path: Path):
    figures = two_stages.figures({"runner": [1.0, 3.0], "torch": [2.0, 2.0]})
    path = tmp_path / "new" / "two_stages.json"
    publish("two_stages", settings={}, seconds={"runner": [1.0]}, figures=figures, losses={}, path=path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "hardware", "versions", "commit", "settings"} <= document.keys()
    assert document["figures"][0] == {
        "name": "runner / torch", "minimum": 0.5, "median": 1.0, "maximum": 1.5, "target": 1.0, "verdict": "met"
    }  # fmt: skip


def test_time_above_compute():
    taken = {"runner 1f1b": [3.5], "torch Schedule1F1B": [3.75]}
    above, _, ratio = sleeping_stages.figures(taken, compute=2.5, schedules=["1f1b"], delayed=False)
    assert above.median == pytest.approx(0.4)
    assert ratio.median == pytest.approx(0.8)


@pytest.mark.slow
def test_two_stages_over_processes():
    run = partial(two_stages.compare, SMALL, microbatches=4, samples=8, rounds=2, steps=1, with_deepspeed=False)
    measured = run_ranks(2, run)
    assert measured["seconds"].keys() == measured["losses"].keys()
    assert {"runner zb_v", "torch ScheduleZBVZeroBubble"} <= measured["seconds"].keys()


@pytest.mark.slow
def test_sleeping_stages_take_at_least_their_schedule():
    settings = {"schedules": ["1f1b", "zb_h1"], "microbatches": 4, "rounds": 2, "delay_seconds": 0.0}
    measured = run_ranks(2, partial(sleeping_stages.compare, 0.002, **settings))
    assert all(value >= 13 * 0.002 for values in measured["seconds"].values() for value in values)


def test_simulated_steps_under_chance():
    setting = jitter.Setting(ranks=4, microbatches=8, seconds=0.02, delay_seconds=0.02, amount=0.3)
    found = {one.name: one for one in jitter.figures("simulated", jitter.play(setting, 12))}
    assert found["simulated: varuna opportunistic / 1f1b recomputed, p90"].verdict == "met"
    assert found["simulated: varuna opportunistic / varuna, p90"].verdict == "met"


@pytest.mark.full
def test_steps_under_chance_of_all_contestants():
    setting = jitter.Setting(ranks=2, microbatches=3, seconds=0.002, delay_seconds=0.001, amount=0.3)
    measured = run_ranks(2, jitter.measure, setting, 2)
    assert measured["seconds"].keys() == jitter.CONTESTANTS.keys()
    assert all(len(values) == 2 for values in measured["seconds"].values())


@pytest.mark.slow
def test_steps_beside_a_save_are_told_from_those_without():
    measured = checkpoints.measure(SMALL, samples=4, rounds=2, every=2, asynchronous=True)
    assert {name: len(values) for name, values in measured["seconds"].items()} == {"with a save": 2, "without": 2}
    assert len(measured["losses"]) == 16
    assert all(value > 0 for values in measured["seconds"].values() for value in values)
    assert len(checkpoints.record_seconds(3)) == 3


@pytest.mark.slow
def test_one_process_takes_turns_with_the_command():
    measured = one_process.measure(SMALL, samples=4, rounds=2, turn=2)
    two_stages.require_equal(measured["losses"])
    assert [len(values) for values in measured["seconds"].values()] == [2, 2]


@pytest.mark.full
def test_a_run_predicts_the_step_of_stages_that_sleep():
    sizes = {"ranks": 2, "microbatches": 4, "steps": 3}
    overrides = prediction.overrides_of("sleeping", **sizes, seconds=0.005)
    found = prediction.measure(overrides, "1f1b", **sizes)
    least = (4 + 1) * 3 * 0.005
    assert found["predicted"] >= least
    assert len(found["measured"]) == 3
    assert min(found["measured"]) >= least


@pytest.mark.full
def test_zero_takes_turns_with_a_hand_written_loop(tmp_path: Path):
    run = partial(zero.measure, SMALL, str(tmp_path), stage=2, samples=8, microbatches=2, rounds=2, turn=2)
    measured = run_ranks(2, run)
    two_stages.require_equal(measured["losses"])
    assert [len(values) for values in measured["seconds"].values()] == [2, 2]
