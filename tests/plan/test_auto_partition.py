"""``partition=auto``: the shorter predicted step of even and of balanced stages that fits, the same on every rank."""

from __future__ import annotations

import copy
from typing import Any

from plan_profiles import layer, model

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.plan.cut.chosen import with_partition
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profile import ModelProfile

BY_TIME = model([layer()] * 7 + [layer(forward_seconds=4.0, backward_seconds=8.0)])
"""Even stages are 4 + 4 layers, of 12 and 24 seconds; balanced ones 5 + 3, of 15 and 21, or 6 + 2, of 18 and 18."""


def request(**changes: Any) -> RunConfig:
    config = RunConfig(memory_limit="1GB")
    config.parallelism.pipeline = 2
    config.schedule.microbatches = config.data.batch_size = 8
    for path, value in changes.items():
        target: Any = config
        *sections, key = path.split("__")
        for section in sections:
            target = getattr(target, section)
        setattr(target, key, value)
    return config


def planned(profile: ModelProfile, **changes: Any) -> RunPlan:
    return make_plan(request(**changes), profile)


def cut_by(policy: str, profile: ModelProfile, **changes: Any) -> RunPlan:
    return planned(profile, **changes, partition__name=policy)


def test_it_is_the_default_of_every_request_that_names_none() -> None:
    assert RunConfig().partition.name == "auto"
    assert resolve(["model=gpt"]).partition.name == "auto"
    assert resolve([]).partition.name == "auto"


def test_uneven_layers_are_balanced_by_seconds() -> None:
    assert planned(BY_TIME).partition == ((0, 5), (6, 7))
    assert planned(BY_TIME).time.step_seconds < cut_by("uniform", BY_TIME).time.step_seconds


def test_stages_that_differ_by_less_than_a_clock_stay_even() -> None:
    noisy = [layer(backward_seconds=2.0 + 0.01 * (number % 3)) for number in range(4)]
    noisy += [layer(backward_seconds=2.0) for _ in range(4)]
    assert planned(model(noisy)).partition == ((0, 3), (4, 7))


def test_what_fits_only_in_uneven_stages_is_cut_so() -> None:
    """Stage 0 keeps two micro-batches in flight, stage 1 one."""
    layers = [layer(saved_bytes=1000, output_bytes=0)] * 8
    tight = {"memory_limit": "7500", "schedule__microbatches": 4, "data__batch_size": 4}
    assert not cut_by("uniform", model(layers), **tight).fits
    plan = planned(model(layers), **tight)
    assert plan.fits
    assert plan.partition == ((0, 2), (3, 7))


def test_where_nothing_fits_even_stages_are_shown_and_the_lowest_peak_is_told() -> None:
    layers = [layer(saved_bytes=1000, output_bytes=0)] * 8
    plan = planned(model(layers), memory_limit="3000")
    assert not plan.fits
    assert plan.partition == cut_by("uniform", model(layers), memory_limit="3000").partition
    lowest = max(cut_by("memory", model(layers), memory_limit="3000").peak_memory_bytes)
    assert f"the lowest peak of those tried is {format_bytes(lowest)}, by partition=memory" in plan.reasons[-1]
    assert not any("pipelining" in line for line in plan.advice)  # what does not fit is not advised


def test_one_stage_has_no_boundaries() -> None:
    config = request(parallelism__pipeline=1)
    plan = make_plan(config, BY_TIME)
    fixed = with_partition(config, plan.partition)
    assert fixed.partition.boundaries == []
    assert make_plan(fixed, BY_TIME).partition == ((0, 7),)


def test_a_search_for_a_schedule_cuts_for_each_one() -> None:
    changes = {"schedule__name": "auto", "schedule__microbatches": 4, "data__batch_size": 4}
    auto = planned(BY_TIME, **copy.deepcopy(changes))
    assert auto.time.step_seconds <= cut_by("uniform", BY_TIME, **changes).time.step_seconds
