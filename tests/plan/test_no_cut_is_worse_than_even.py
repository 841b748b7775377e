"""Cuts by every policy are as fast as even stages where these fit, and a rank's memory is that of all its stages."""

from __future__ import annotations

import random
from typing import Any

import pytest
from covering import covering
from plan_profiles import layer, loss_layer, model

from runner.config.schema import RunConfig
from runner.plan.cut.partition import uniform
from runner.plan.make import make_plan
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.memory.rank_limit import RankMemory
from runner.plan.memory.stage_limit import StageMemoryLimit
from runner.plan.stages.figures import stage_figures
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.schedule.catalogue import registry
from runner.schedule.lowering.program import lower

POLICIES = ("profile", "memory", "parameters", "auto")
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "zb_v", "interleaved_1f1b", "hanayo", "chimera")


def planned(profile: ModelProfile, schedule: str, policy: str, limit: str = "1GB", pipeline: int = 4) -> RunPlan:
    config = RunConfig(memory_limit=limit)
    config.parallelism.pipeline = pipeline
    config.schedule.name, config.schedule.microbatches = schedule, 8
    config.data.batch_size = 8
    config.partition.name = policy
    return make_plan(config, profile)


def transformer(blocks: int = 34) -> ModelProfile:
    """Like a language model: a cheap embedding, equal blocks, and a head that saves more and takes longer."""
    block: dict[str, Any] = {"saved_bytes": 3000, "weight_bytes": 400, "gradient_bytes": 400, "num_parameters": 100}
    rows = [layer(**block | {"forward_seconds": 0.01, "backward_seconds": 0.02})]
    rows += [layer(**block)] * (blocks - 2)
    rows += [layer(**block | {"forward_seconds": 1.4, "backward_seconds": 2.8, "saved_bytes": 900})]
    return model(rows, loss=loss_layer(saved_bytes=800))


@pytest.mark.costly
@pytest.mark.parametrize(("schedule", "policy"), covering({"schedule": SCHEDULES, "policy": POLICIES}, strength=1))
def test_no_cut_is_slower_than_even_stages_that_fit(schedule: str, policy: str) -> None:
    chance = random.Random(schedule)
    profiles = [transformer()]
    for _ in range(3):
        seconds = [chance.choice((0.1, 1.0, 3.0)) * chance.uniform(0.8, 1.2) for _ in range(12)]
        sizes = [chance.randint(10, 4000) for _ in seconds]
        rows = [
            layer(forward_seconds=one, backward_seconds=2 * one, saved_bytes=size, num_parameters=size)
            for one, size in zip(seconds, sizes, strict=True)
        ]
        profiles.append(model(rows))
    for profile in profiles:
        own, even = planned(profile, schedule, policy), planned(profile, schedule, "uniform")
        assert even.fits
        assert own.fits
        assert own.time.step_seconds <= even.time.step_seconds
        if policy == "memory":
            assert max(own.peak_memory_bytes) <= max(even.peak_memory_bytes)


@pytest.mark.parametrize("schedule", ["zb_v", "interleaved_1f1b"])
def test_a_limit_that_even_stages_almost_reach_leaves_stages_alike(schedule: str) -> None:
    """The limit is a rank's: an equal part of it for each stage would allow one layer here and seven there."""
    profile = transformer()
    even = planned(profile, schedule, "uniform")
    limit = str(max(even.peak_memory_bytes))
    tight = planned(profile, schedule, "profile", limit)
    assert tight.fits
    assert tight.time.step_seconds <= even.time.step_seconds
    assert max(1 + last - first for first, last in tight.partition) <= 6


@pytest.mark.costly
@pytest.mark.parametrize("schedule", ["zb_v", "interleaved_1f1b"])
def test_where_even_stages_do_not_fit_the_ranks_are_balanced_under_the_limit(schedule: str) -> None:
    """The first layers save ten times as much as the others."""
    profile = model([layer(saved_bytes=9000)] * 6 + [layer(saved_bytes=900)] * 26)
    even = planned(profile, schedule, "uniform")
    least = planned(profile, schedule, "memory", str(max(even.peak_memory_bytes) // 2))
    assert max(least.peak_memory_bytes) < max(even.peak_memory_bytes)
    limit = int(max(least.peak_memory_bytes) * 1.2)
    assert limit < max(even.peak_memory_bytes)
    for policy in ("profile", "memory", "auto"):
        assert planned(profile, schedule, policy, str(limit)).fits, policy


@pytest.mark.parametrize("schedule", ["zb_v", "v_half", "interleaved_1f1b", "hanayo", "chimera", "zb_h1"])
def test_the_bound_of_a_rank_is_a_little_above_what_the_walk_finds(schedule: str) -> None:
    profile = transformer(24)
    order = registry.build(schedule, ranks=4, microbatches=8)
    layers = uniform(24, order.stages)
    stages = StageMemoryLimit.of(profile, order, [10**9] * order.ranks, MemoryNeeds(8, temporaries=2))
    walked = predict_memory(lower(order), profile, stage_figures(profile, layers), MemoryNeeds(8))
    bound = RankMemory(stages, order, [10**9] * order.ranks).highest(layers)
    assert max(walked.peak_bytes) * 0.99 <= bound <= max(walked.peak_bytes) * 1.25


def test_a_cut_that_gives_way_to_even_stages_says_so() -> None:
    plan = planned(transformer(), "interleaved_1f1b", "profile")
    told = [line for line in plan.advice if line.startswith("partition=profile has a step of ")]
    assert len(told) == (plan.partition == uniform(34, 8))
