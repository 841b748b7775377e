"""A plan for this machine counts in its step that ranks share cores, and says so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.config.units import format_seconds
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.profiling.model import profile_model

FOUR = ("model=mlp", "parallelism.pipeline=4", "schedule.microbatches=8", "device=cpu")
ACCELERATED = ("device=cuda", "memory_limit=1GB")


def measured(*overrides: str, **options: Any) -> RunPlan:
    """The plan of layers that take 10 ms forward and 20 ms back."""
    return make_plan(request(overrides), profile(), **options)


@cache
def request(overrides: tuple[str, ...]) -> RunConfig:
    return resolve(overrides)


@cache
def profile() -> ModelProfile:
    made = profile_model(resolve(["model=mlp", "device=cpu"]))
    layers = [replace(layer, forward_seconds=0.01, backward_seconds=0.02) for layer in made.layers]
    loss = replace(made.loss, forward_seconds=0.0, backward_seconds=0.0)
    return replace(made, layers=tuple(layers), loss=loss, seconds_source="measured", optimizer_seconds_per_byte=0.0)


def test_one_core_does_everything_one_after_the_other() -> None:
    plan = measured(*FOUR, cores=1)
    assert plan.time.step_seconds == pytest.approx(sum(plan.time.busy_seconds))
    (note,) = [note for note in plan.advice if " share " in note]
    alone = format_seconds(measured(*FOUR).time.step_seconds)
    told = f"4 ranks share 1 core, which the predicted step counts: with a core for each thread it would be {alone}"
    assert note == f"{told}; 4 processes on 1 core may take minutes to start"
    (few,) = [note for note in measured(*FOUR, cores=2).advice if " share " in note]
    assert "to start" not in few


@pytest.mark.parametrize(
    "overrides",
    [(), ("hardware=a100_40gb",), ACCELERATED, ("launcher=slurm",), ("parallelism.pipeline=1",)],
    ids=["cores_for_all", "another_machine", "accelerator", "cluster", "one_rank"],
)
def test_ranks_with_cores_of_their_own_are_predicted_as_before(overrides: tuple[str, ...]) -> None:
    cores = 2 if overrides else 4
    plan = measured(*FOUR, *overrides, cores=cores)
    assert plan.time.alone_seconds is None
    assert not [note for note in plan.advice if " share " in note]


def test_threads_of_a_rank_count() -> None:
    plan = measured(*FOUR, "trainer.threads=2", cores=4)
    assert [note for note in plan.advice if "4 ranks of 2 threads each share 4 cores" in note]
    assert plan.time.step_seconds == pytest.approx(measured(*FOUR, cores=2).time.step_seconds)


def test_ranks_that_share_a_core_update_one_after_the_other() -> None:
    updating = replace(profile(), optimizer_seconds_per_byte=1e-6)
    own, shared = (
        [make_plan(request(FOUR), each, cores=cores).time.step_seconds for each in (profile(), updating)]
        for cores in (None, 1)
    )
    assert shared[1] - shared[0] == pytest.approx(4 * (own[1] - own[0]))
