"""The benchmarks run, compute the same on all sides, and say what they measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.plan.make import make_plan
from runner.profiling.model import profile_model
from runner.recipes.benchmarks import (
    auto,
    jitter,
    messages,
    pipefisher,
    prediction,
    sleeping_stages,
    steady_streams,
    two_stages,
)
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.result import figure, publish
from runner.recipes.benchmarks.rounds import take_turns
from runner.recipes.benchmarks.workload import GptSize

SMALL = GptSize(layers=2, width=16, sequence_length=8, vocab_size=20, heads=2)


def test_contestants_take_turns_and_the_first_rounds_do_not_count() -> None:
    calls: list[str] = []
    contestants = {name: partial(calls.append, name) for name in "ab"}
    seconds = take_turns(contestants, warm_rounds=1, rounds=2, steps=2, meet=lambda: calls.append("|"))
    assert "".join(calls) == "|aa||bb|" * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_a_figure_is_judged_by_its_median() -> None:
    assert figure("x", [0.9, 1.5, 1.0], target=1.0).verdict == "met"
    assert figure("x", [0.9, 1.5, 1.1], target=1.0).verdict == "missed"
    assert figure("x", [2.0]).verdict == ""


def test_other_losses_are_no_comparison() -> None:
    with pytest.raises(RuntimeError, match="torch computes other losses"):
        two_stages.require_equal({"runner": [1.0, 2.0], "torch": [1.0, 2.1]})


def test_the_result_names_hardware_versions_and_date(tmp_path: Path) -> None:
    figures = two_stages.figures({"runner": [1.0, 3.0], "torch": [2.0, 2.0]})
    path = tmp_path / "new" / "two_stages.json"
    publish("two_stages", settings={}, seconds={"runner": [1.0]}, figures=figures, losses={}, path=path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "hardware", "versions", "commit", "load", "settings"} <= document.keys()
    assert document["figures"][0] == {
        "name": "runner / torch", "minimum": 0.5, "median": 1.0, "maximum": 1.5, "target": 1.0, "verdict": "met"
    }  # fmt: skip


def test_time_above_compute() -> None:
    taken = {"runner 1f1b": [3.5], "torch Schedule1F1B": [3.75]}
    above, _, ratio = sleeping_stages.figures(taken, compute=2.5, schedules=["1f1b"], delayed=False)
    assert above.median == pytest.approx(0.4)
    assert ratio.median == pytest.approx(0.8)


def test_chimeras_bubble_above_its_theory() -> None:
    """One unit of doubled forwards on two ranks has no bubble; 1f1b has no closed form to compare here."""
    taken = {"runner 1f1b": [3.5], "runner chimera_doubling": [4.0]}
    (found,) = sleeping_stages.above_theory(taken, 3.0, ["1f1b", "chimera_doubling"], ranks=2, microbatches=4)
    assert found.median == pytest.approx(0.25)
    assert found.verdict == "missed"
    (found,) = sleeping_stages.above_theory(taken, 3.0, ["chimera_doubling"], ranks=4, microbatches=8)
    assert found.median == pytest.approx(0.25 - 2 / 14)


def test_auto_is_judged_by_the_shortest_of_the_others() -> None:
    alone = "one process beside a copy"
    taken = {"auto": [1.0, 1.1], "gpipe": [3.0, 3.0], "1f1b": [1.0, 1.0], alone: [2.0, 2.2]}
    first, second, share = auto.figures(taken, 2)
    assert (first.name, first.target, first.verdict) == ("auto / 1f1b", 1.0, "missed")
    assert (second.name, second.target) == ("auto / gpipe", None)
    assert share.median == pytest.approx(1.0)
    assert share.verdict == "met"


@pytest.mark.full
def test_two_stages_over_processes() -> None:
    run = partial(two_stages.compare, SMALL, microbatches=4, samples=8, rounds=2, steps=1, with_deepspeed=False)
    measured = run_ranks(2, run)
    assert measured["seconds"].keys() == measured["losses"].keys()
    assert {"runner zb_v", "torch ScheduleZBVZeroBubble"} <= measured["seconds"].keys()


def test_the_share_that_sockets_save() -> None:
    (found,) = messages.figures("short", {"sockets for short messages": [0.9, 1.0], "Gloo for all": [1.0, 1.0]})
    assert found.median == pytest.approx(0.05)


def test_simulated_steps_under_chance() -> None:
    setting = jitter.Setting(ranks=4, microbatches=8, seconds=0.02, delay_seconds=0.02, amount=0.3)
    found = {one.name: one for one in jitter.figures("simulated", jitter.play(setting, 12))}
    assert found["simulated: varuna opportunistic / 1f1b recomputed, p90"].verdict == "met"
    assert found["simulated: varuna opportunistic / varuna, p90"].verdict == "met"


def test_twelve_requests_are_predicted_and_judged() -> None:
    requests = prediction.twelve(steps=4)
    assert len(requests) == 12
    for words in requests.values():
        assert [problem.line() for problem in rules(resolve([*words, "device=cpu", "run_dir=run"]))] == []
    run = {"predicted": 0.095, "measured": [0.1, 0.1, 0.2], "memory": {"predicted": [100, 50], "measured": [99, 52]}}
    short = {"predicted": 0.012, "measured": [0.01], "memory": {"predicted": [100, 100], "measured": [90, 95]}}
    judged = {one.name: one for one in prediction.all_figures({"a": run, "b": short})}
    assert judged["a: |predicted / median step - 1|"].verdict == "met"
    assert judged["b: |predicted / median step - 1|"].target == 0.25
    assert judged["a: memory above its prediction"].median == pytest.approx(0.04)
    assert judged["a: memory above its prediction"].verdict == "missed"
    assert judged["b: memory below its prediction"].verdict == "missed"


@pytest.mark.parametrize(("name", "fewest"), [("pipedream", 1), ("pipemare", 1), ("pipedream_2bw", 7), ("wpipe", 14)])
def test_as_few_microbatches_as_keep_a_pipeline_full(name: str, fewest: int) -> None:
    assert steady_streams.fewest_microbatches(name, 8) == fewest


def test_a_pipeline_that_is_flushed_is_never_full() -> None:
    with pytest.raises(ValueError, match="1f1b: the pipeline of 4 ranks is never full"):
        steady_streams.fewest_microbatches("1f1b", 4)


def test_steady_streams_are_judged_by_their_sleep_and_by_the_prediction() -> None:
    rounds = [{"pipedream": {"sleep": 0.97, "measured": 1.0, "predicted": 0.9}} for _ in range(2)]
    waiting, error = steady_streams.figures(rounds)
    assert waiting.median == pytest.approx(0.03)
    assert error.median == pytest.approx(0.1)
    assert [waiting.verdict, error.verdict] == ["met", "missed"]


@pytest.mark.costly
def test_pipefisher_prints_what_a_run_recorded() -> None:
    """Its contestants can be planned, and share all but the optimizer's and the schedule's keys."""
    shared = pipefisher.workload(GptSize(2, 16, 8, 20, 2), microbatches=2, steps=4)
    asked = pipefisher.contestants(3)
    config = resolve([*shared, *asked["pipefisher, kfac"], "cost.B=4"])
    plan = make_plan(config, profile_model(config))
    record = {
        "bubble_ratio": {"predicted": 0.1, "measured": 0.2},
        "step_seconds": {"predicted": 0.004, "all": [0.004, 0.006]},
        "seconds": {"compute": 3.0, "bubble": 1.0, "optimizer": 0.5, "data": 0.5},
        "loss": [4.0, 3.0, 2.0, 1.0],
    }
    printed = pipefisher.table({"pipefisher, kfac": pipefisher.Trained(record, plan)}, plan.schedule.windows)
    head, rule, row = printed.splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    without = f"{plan.time.utilisation_without_fills:.1%}"
    every = f"{plan.schedule.windows} steps"
    assert cells[:8] == ["pipefisher, kfac", every, "90.0%", "80.0%", without, "4.0 ms", "5.0 ms", "70.0%"]
    assert cells[8:] == ["4.000", "3.000", "2.000", "1.000"]
    for own in asked.values():
        assert rules(resolve([*shared, *own])) == []
