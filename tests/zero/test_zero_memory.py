"""Bytes of weights, gradients and optimizer states: counted from live tensors, and predicted with their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from narrow import present
from plan_profiles import layer, model

from runner.config.compose.resolve import resolve
from runner.optim.build import state_bytes_per_gradient_byte
from runner.optim.catalogue.registry import OPTIMIZERS
from runner.plan.make import make_plan
from runner.plan.memory.zero import sharing_of
from runner.plan.stages.figures import stage_figures
from runner.plan.values import RunPlan
from runner.profiling.model import profile_model

WIDE = ("model.target=zero_model:model", "parallelism.data=2", "schedule.microbatches=2")


def predicted(overrides: Sequence[str]) -> tuple[int, int]:
    """Of one rank: between steps, and when gradients are there."""
    asked = ("data.target=user_code:points", "loss.target=user_code:mean")
    config = resolve([*asked, "data.batch_size=8", "device=cpu", *WIDE, *overrides])
    profile = profile_model(config)
    (figures,) = stage_figures(profile, [(0, len(profile.layers) - 1)])
    sharing = present(sharing_of(config, profile, OPTIMIZERS[config.optimizer.name].temporaries))
    held = sharing.held(figures)
    # The bucket is let go, and the last partition of gradients is there, when the update begins.
    arrives = sharing.stage < 3 and sharing.optimizer == "none"
    gradients = figures.gradient_bytes // 2 if arrives else 0
    return held.device + held.host, held.device + held.host + gradients


def planned(*overrides: str, parameters: int) -> RunPlan:
    """The plan of a model of so many parameters, as 48 equal layers, on a machine of its own kind."""
    config = resolve(["model=mlp", "hardware=v100_32gb", "precision=fp16", "data.batch_size=1", *overrides])
    each = 2 * parameters // 48
    sizes: dict[str, Any] = {"weight_bytes": each, "gradient_bytes": each, "largest_parameter_bytes": each // 12}
    profile = model([layer(**sizes, saved_bytes=4_000_000, output_bytes=4_000_000)] * 48)
    ratio = state_bytes_per_gradient_byte(config.optimizer, 2.0)
    profile = replace(profile, optimizer_bytes_per_gradient_byte=ratio, master_bytes_per_gradient_byte=2.0)
    return make_plan(config, profile)


@pytest.mark.parametrize("billions", [10, 13])
def test_one_device_of_32_gb_trains_more_than_ten_billion_parameters_with_offload(billions: int) -> None:
    refused = planned(parameters=billions * 10**9)
    assert not refused.fits
    assert not planned("zero.stage=0", parameters=billions * 10**9).fits
    offloaded = planned("zero.stage=2", "offload.optimizer=cpu", parameters=billions * 10**9)
    assert offloaded.fits
    assert 2 * billions * 10**9 <= max(offloaded.peak_memory_bytes) <= 32 * 10**9
    assert max(offloaded.host_memory_bytes) == pytest.approx(18 * billions * 10**9, rel=0.03)
    assert any("offload.optimizer=cpu" in problem.fix for problem in refused.problems)


def test_a_host_without_room_for_what_is_offloaded_is_refused() -> None:
    asked = ("zero.stage=2", "offload.optimizer=cpu", "hardware.host_memory_bytes=1e11")
    plan = planned(*asked, parameters=10**10)
    assert not plan.fits
    (problem,) = plan.problems
    assert problem.path == "hardware.host_memory_bytes"
