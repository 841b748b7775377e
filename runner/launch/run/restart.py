"""A run that has begun in a directory goes on there, whatever ended it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.schema import RunConfig
from runner.launch.run.prepare import write_request
from runner.launch.run.resume import AUTO, with_checkpoint
from runner.profile import PROFILE_FILE
from runner.record import RECORD_FILE, RunRecord

if TYPE_CHECKING:
    from runner.plan.values import RunPlan

__all__ = ["FAILURES", "RESTARTS", "from_newest", "go_on", "has_begun"]

RESTARTS = "restarts"
"""The record's key for how often a run has been started again."""
FAILURES = "failures"
"""The record's key for how often it had to be, because it broke."""


def has_begun(run_dir: Path) -> bool:
    """Whether a run was planned in the directory, so that it can go on as it was."""
    return (run_dir / RECORD_FILE).exists() and (run_dir / PROFILE_FILE).exists()


def from_newest(config: RunConfig) -> RunConfig:
    """The request as it goes on in its ``run_dir``: from the newest good checkpoint, or from where it began.

    Raises:
        RequestError: a checkpoint is of another model or another order of samples.
    """
    newest = with_checkpoint(replace(config, resume=AUTO))
    return newest if newest.resume is not None else with_checkpoint(config)


def go_on(config: RunConfig, run_dir: Path, *, command: str) -> tuple[RunConfig, RunPlan]:
    """Put the run in ``run_dir`` back to its newest good checkpoint, or to where it began; by the same plan.

    Args:
        config: the request as it was first started.

    Returns:
        the request as it starts now, and its plan.
    """
    from runner.training.run_plan import planned

    config = from_newest(replace(config, run_dir=str(run_dir)))
    plan = planned(config, run_dir)
    write_request(config, plan, run_dir, command=command)
    record = RunRecord.load(run_dir)
    record.replace(extras=record.extras | {RESTARTS: record.extras.get(RESTARTS, 0) + 1}).save(run_dir)
    return config, plan
