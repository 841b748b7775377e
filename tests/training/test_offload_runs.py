"""What a plan says of activations that wait in the host's memory: its step is longer by at most their copies."""

from __future__ import annotations

import pytest

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profiling.model import profile_model

SMALL = (
    "model=mlp", "model.kwargs.width=48", "model.kwargs.layers=6", "data.batch_size=16", "device=cpu",
    "partition=uniform",
)  # fmt: skip
OFFLOAD = "offload=activations_async"


def planned(*overrides: str) -> RunPlan:
    config = resolve([*SMALL, *overrides])
    return make_plan(config, profile_model(config))


@pytest.mark.costly
def test_a_slower_link_makes_a_step_longer_by_at_most_its_copies() -> None:
    layout = ("parallelism.pipeline=2", "schedule.microbatches=4", "hardware=laptop_cpu")  # seconds are estimated
    free = planned(*layout, OFFLOAD)
    steps = [free.time.step_seconds]
    # However slow the measured machine is: copies that take the step's own time, then ten and a hundred times as long.
    for times in (1, 10, 100):
        copies = times * free.time.step_seconds
        speed = 2 * free.host_activation_bytes / copies
        plan = planned(*layout, OFFLOAD, f"offload.bytes_per_second={speed}")
        assert plan.time.step_seconds <= free.time.step_seconds + copies + 1e-9
        assert times == 1 or max(plan.to_json()["offload_seconds"]) > 0
        steps.append(plan.time.step_seconds)
    assert steps == sorted(steps)
    assert any("computes wait up to" in line for line in plan.advice)
