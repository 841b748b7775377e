"""Continues a run in its directory, whatever ended it before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.schema import RunConfig
from runner.launch.run.prepare import write_request
from runner.launch.run.resume import AUTO, with_checkpoint
from runner.record import RECORD_FILE, RunRecord

if TYPE_CHECKING:
    from runner.plan.values import RunPlan

__all__ = ["FAILURES", "RESTARTS", "failures_before", "from_newest", "go_on", "has_begun"]

RESTARTS = "restarts"
"""Key in the record's extras: how often the run has been started again."""
FAILURES = "failures"
"""Key in the record's extras: how often it was started again because it had failed."""


def has_begun(run_dir: Path) -> bool:
    """Whether a run was planned in the directory, so that it can continue with the same plan."""
    from runner.plan.values import PLAN_FILE

    return (run_dir / RECORD_FILE).exists() and (run_dir / PLAN_FILE).exists()


def failures_before(record: RunRecord) -> int:
    """How many starts of the run have failed before the present one.

    It is counted when the run is started again, so that all ranks of a start read the same number, whoever reports the
    end of that start.
    """
    return int(record.extras.get(FAILURES, 0))


def from_newest(config: RunConfig) -> RunConfig:
    """The request as it continues in its ``run_dir``: from the newest valid checkpoint, or from the beginning.

    Raises:
        RequestError: a checkpoint belongs to another model or to another order of samples.
    """
    newest = with_checkpoint(replace(config, resume=AUTO))
    return newest if newest.resume is not None else with_checkpoint(config)


def go_on(config: RunConfig, run_dir: Path, *, command: str) -> tuple[RunConfig, RunPlan]:
    """Set the run in ``run_dir`` back to its newest valid checkpoint or to the beginning, with the same plan.

    Args:
        config: the request as it was first started.

    Returns:
        the request as it starts now, and its plan.
    """
    from runner.plan.values import RunPlan as Stored

    had_failed = RunRecord.load(run_dir).status == "failed"
    config = from_newest(replace(config, run_dir=str(run_dir)))
    plan = Stored.load(run_dir)
    write_request(config, plan, run_dir, command=command)
    record = RunRecord.load(run_dir)
    counts = {RESTARTS: record.extras.get(RESTARTS, 0) + 1, FAILURES: failures_before(record) + int(had_failed)}
    record.replace(extras=record.extras | counts).save(run_dir)
    return config, plan
