"""A plan says where offloading to the CPU moves nothing, because the CPU is the device."""

from __future__ import annotations

import pytest

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profiling.model import profile_model

_SHARED = ("model=mlp", "parallelism.data=2", "zero.stage=3")
_NOTHING = "the device is the CPU, so that nothing leaves its memory"


def _plan(*overrides: str) -> RunPlan:
    config = resolve([*_SHARED, *overrides])
    return make_plan(config, profile_model(config))


@pytest.mark.parametrize("part", ["optimizer", "parameters"])
def test_states_offloaded_on_a_cpu_are_said_to_stay_there(part: str) -> None:
    here = _plan(f"offload.{part}=cpu", "device=cpu")
    (note,) = [note for note in here.advice if _NOTHING in note]
    assert note.startswith(f"offload.{part}=cpu: ")
    assert max(here.memory.peak_bytes) >= max(_plan("device=cpu").memory.peak_bytes)


def test_a_device_is_relieved_by_its_host() -> None:
    moved = _plan("offload.optimizer=cpu", "hardware=a100_80gb")
    assert not [note for note in moved.advice if _NOTHING in note]
