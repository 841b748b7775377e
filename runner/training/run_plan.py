"""Makes a run's plan again from its directory, so that every rank and every resumed run has the same plan."""

from __future__ import annotations

from pathlib import Path

from runner.config.schema import RunConfig
from runner.model.device import device_memory_bytes
from runner.plan.cores import num_cores
from runner.plan.cut.chosen import with_chosen_partition
from runner.plan.make import make_plan
from runner.plan.search.choose import read_chosen
from runner.plan.values import RunPlan
from runner.profile import read_profile

__all__ = ["planned"]


def planned(config: RunConfig, run_dir: Path) -> RunPlan:
    """The plan from the saved layer profile, and with the saved schedule and partition if the plan had chosen them."""
    chosen, config = read_chosen(run_dir, config), with_chosen_partition(config, run_dir)
    return make_plan(
        config,
        read_profile(run_dir),
        schedule=chosen,
        device_memory_bytes=device_memory_bytes(config),
        cores=num_cores(),
    )
