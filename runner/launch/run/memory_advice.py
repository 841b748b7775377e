"""Advice for a run that ran out of memory although its plan had predicted that it fits."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.errors import RequestError
from runner.record import RunRecord

if TYPE_CHECKING:
    from runner.plan.values import RunPlan

__all__ = ["advise", "smaller"]

logger = logging.getLogger(__name__)

_LESS = 0.8  # the advised request must need less than this share of the predicted peak
_ADVICE = "advice"


def advise(config: RunConfig, run_dir: Path) -> None:
    """Say in the log, and in the record's ``advice``, which overrides need less memory."""
    from runner.plan.values import RunPlan as Stored

    try:
        advice = smaller(config, Stored.load(run_dir))
    # The memory that is left may be too little to make a plan, and the file may be of another version.
    except (MemoryError, RuntimeError, OSError, ValueError) as error:
        logger.error("what needs less could not be planned: %s", error)
        return
    logger.error("%s", advice)
    record = RunRecord.load(run_dir)
    record.replace(extras=record.extras | {_ADVICE: advice}).save(run_dir)


def smaller(config: RunConfig, plan: RunPlan) -> str:
    """Overrides whose plan has a peak that is at least a fifth smaller."""
    from runner.launch.run.measured_plan import measured_plan

    peak = max(plan.peak_memory_bytes)
    limited = replace(config, memory_limit=str(int(_LESS * peak)), resume=None)
    fullest = plan.fullest
    told = f"predicted were {format_bytes(plan.peak_memory_bytes[fullest])} of {format_bytes(plan.limit_of(fullest))}"
    try:
        problems = measured_plan(limited, plan.profile).problems
    except RequestError:
        problems = ()
    fixes = [problem.fix for problem in problems if problem.fix]
    return f"{told}. Less is needed with {fixes[0]}" if fixes else f"{told}; nothing tried needs a fifth less"
