"""The one override that would shorten a plan's step most is named first, with the gain that its own plan predicts."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
from plan_profiles import layer, model

from runner.config.schema import RunConfig
from runner.memory.solve.values import Segment, StageChain
from runner.plan.make import make_plan
from runner.plan.search import improve
from runner.plan.uncertainty import least_gain
from runner.plan.values import Link
from runner.profile import ModelProfile

HALVES = {"input_gradient_seconds": 1.0, "weight_gradient_seconds": 1.0}
EVEN = model([layer(gradient_bytes=1000, weight_bytes=1000, output_bytes=1, **HALVES)] * 8)
FAST, SLOW = Link(0.0, 1e12), Link(0.0, 100.0)
"""Over the slow link, replicas that would reduce all weights are slower than any pipeline."""


def request(**changes: Any) -> RunConfig:
    config = RunConfig(memory_limit="1GB")
    config.parallelism.pipeline = 4
    config.schedule.microbatches = config.data.batch_size = 8
    for path, value in changes.items():
        section, _, key = path.partition("__")
        setattr(getattr(config, section), key, value)
    return config


def advice(config: RunConfig, profile: ModelProfile = EVEN, link: Link = SLOW, **more: Any) -> tuple[str, ...]:
    return make_plan(config, profile, link=link, suggest=True, **more).advice


def test_the_first_line_is_the_best_of_all_and_true() -> None:
    """No other order of one pipeline or two is predicted to be shorter, and the gain is that of a plan with it."""
    config = request(schedule__name="gpipe")
    before = make_plan(config, EVEN, link=SLOW)
    first = advice(config)[0]
    words, told = first.split(" would make a step ")
    name = words.removeprefix("schedule=")
    after = make_plan(request(schedule__name=name), EVEN, link=SLOW).time.step_seconds
    assert told.startswith(f"{1 - after / before.time.step_seconds:.0%} shorter: ")
    for other in ("1f1b", "zb_h1", "interleaved_1f1b", "chimera"):
        assert after <= make_plan(request(schedule__name=other), EVEN, link=SLOW).time.step_seconds


def test_a_layout_without_a_pipeline_goes_first_where_it_gains_more() -> None:
    first, second, *_ = advice(request(), link=FAST)
    assert first.startswith("pipelining does not pay here: ")
    assert first.endswith("Try parallelism.pipeline=1 parallelism.data=4 schedule.microbatches=1.")
    assert second.startswith("of the layouts with a pipeline, schedule=")


def run_again(chain: StageChain) -> list[Segment]:
    return [Segment(chain.first, chain.last, recompute=True)]


def test_in_place_of_a_users_own_policy_its_target_goes_too() -> None:
    config = request(parallelism__pipeline=1, schedule__microbatches=1)
    config.activation_checkpoint.name, config.activation_checkpoint.target = "mine", f"{__name__}:run_again"
    first = advice(config, model([layer(**HALVES)] * 4))[0]
    assert first.startswith(
        "activation_checkpoint=none activation_checkpoint.target=null would make a step 25% shorter"
    )


def test_what_costs_time_and_is_not_needed_is_named() -> None:
    profile = model([layer(**HALVES)] * 4)
    config = request(parallelism__pipeline=1, schedule__microbatches=1, activation_checkpoint__name="full")
    (line,) = advice(config, profile)
    assert line == "activation_checkpoint=none would make a step 25% shorter: 96 s instead of 2 min 08 s"


def test_a_gain_within_the_uncertainty_is_not_told() -> None:
    """Where ranks take all cores of this machine, an order gains less than it is predicted to."""
    config = request(schedule__name="gpipe")
    usual = least_gain(config, None, accelerated=False)
    assert least_gain(config, 5, accelerated=False) == usual
    full = least_gain(config, 4, accelerated=False)
    assert full > usual == least_gain(config, 4, accelerated=True)
    for cores, least in ((5, usual), (4, full)):
        for line in advice(config, cores=cores):
            gain = re.search(r"would make a step (\d+)% shorter", line)
            assert gain is None or int(gain[1]) >= 100 * least - 1


def test_a_pipeline_is_neither_better_nor_worse_within_the_uncertainty() -> None:
    """One sample in one stage is as long as over two: no other layout can be told apart from it."""
    profile = model([layer(forward_seconds=1.0, backward_seconds=1.0)] * 2)
    config = request(schedule__name="naive", parallelism__pipeline=2, schedule__microbatches=1, data__batch_size=1)
    (line,) = [each for each in advice(config, profile, FAST) if "pipeline" in each]
    assert line.startswith("a step may be as long without a pipeline, by parallelism.pipeline=1 ")
    assert make_plan(config, profile, link=FAST).cautions == ()


def test_it_is_silent_where_nothing_helps_or_the_plan_does_not_fit() -> None:
    single = request(parallelism__pipeline=1, schedule__microbatches=1)
    assert advice(single) == ()
    refused = make_plan(replace(single, memory_limit="1kB"), EVEN, suggest=True)
    assert not refused.fits
    assert not any("would make a step" in line for line in refused.advice)


def test_idle_cores_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six cores are three for each of two replicas; the gain is what the layers take with so many threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    asked: list[int] = []

    def profile_of(config: RunConfig) -> ModelProfile:
        asked.append(config.trainer.threads)
        return model([layer(forward_seconds=0.5, backward_seconds=1.0)] * 8)

    config = request(parallelism__pipeline=1, parallelism__data=2, schedule__microbatches=1, data__batch_size=2)
    slow = model([layer()] * 8)
    first = advice(config, slow, FAST, profile_of=profile_of)[0]
    assert asked == [3]
    assert first == "trainer.threads=3 would make a step 50% shorter: 12 s instead of 24 s"
    config.hardware.name = "a100_80gb"
    assert not any("threads" in line for line in advice(config, slow, FAST, profile_of=profile_of))


def test_micro_batches_stay_where_layers_see_their_statistics() -> None:
    def names(profile: ModelProfile) -> set[str]:
        config = request(parallelism__pipeline=1, schedule__microbatches=4)
        statistics = any(one.has_running_statistics for one in profile.layers)
        found = improve._candidates(config, measures_threads=False, keeps_microbatches=statistics)
        return {key for overrides in found for key in overrides}

    assert "schedule.microbatches" in names(EVEN)
    assert "schedule.microbatches" not in names(model([layer(statistics_bytes=8)]))


def test_only_a_plan_that_is_asked_for_it_tries() -> None:
    assert not any("would make a step" in line for line in make_plan(request(), EVEN, link=SLOW).advice)
