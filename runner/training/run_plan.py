"""A run's plan once more, from what its directory holds: every rank, and a run that goes on, must make the same."""

from __future__ import annotations

from pathlib import Path

from runner.config.schema import RunConfig
from runner.model.device import device_memory_bytes
from runner.plan.make import make_plan
from runner.plan.search.choose import read_chosen
from runner.plan.values import RunPlan
from runner.profile import read_profile

__all__ = ["planned"]


def planned(config: RunConfig, run_dir: Path) -> RunPlan:
    """The plan by the layer profile, and the schedule where the plan chose it, that the run was first planned with."""
    chosen = read_chosen(run_dir, config)
    return make_plan(config, read_profile(run_dir), schedule=chosen, device_memory_bytes=device_memory_bytes(config))
