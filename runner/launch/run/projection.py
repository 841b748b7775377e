"""Projects a measured run to another layout and size: what its prediction lacked is put onto another prediction.

A run's median step has a part that the schedule does not change (the data, callbacks and the loop around the steps) and
a part that plans predict. Of the second the run says how much longer it took than predicted. Another plan of the same
machine is multiplied by that, and the first part is added as it was.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.schema import RunConfig
from runner.config.units import format_seconds
from runner.errors import Problem, RequestError, raise_problems
from runner.plan.values import RunPlan
from runner.record import RECORD_FILE, RunRecord

__all__ = ["MeasuredRun", "Projection", "measured_run"]

_FIXED = ("data", "callbacks", "rest")
"""Parts of a step's seconds that no layout changes."""
_FEWEST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Projection:
    """The seconds of a step that is planned, as a measured run lets expect them.

    Args:
        run_dir: the run.
        ratio: how many times as long as predicted its schedule took.
        fixed_seconds: seconds of a step beside the schedule.
        low, seconds, high: seconds of a step if it is like the run's fastest tenth, its median and its slowest tenth.
    """

    run_dir: Path
    ratio: float
    fixed_seconds: float
    low: float
    seconds: float
    high: float

    def to_json(self) -> dict[str, Any]:
        return {
            "from": str(self.run_dir),
            "ratio": self.ratio,
            "fixed_seconds": self.fixed_seconds,
            "step_seconds": {"low": self.low, "median": self.seconds, "high": self.high},
        }

    @property
    def line(self) -> str:
        span = f"{format_seconds(self.low)} to {format_seconds(self.high)}"
        fixed = f"and {format_seconds(self.fixed_seconds)} a step beside it"
        return (
            f"projected from {self.run_dir}: {format_seconds(self.seconds)} a step ({span}). That run's schedule took "
            f"{self.ratio:.2f} times its prediction, {fixed}"
        )


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run whose steps were measured.

    Args:
        run_dir: its directory.
        record: its record.
        predicted: the seconds of a step that its plan promised.
    """

    run_dir: Path
    record: RunRecord
    predicted: float

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """The run's request with other words: those of ``words`` replace the run's own of the same keys.

        Raises:
            RequestError: ``runner train`` did not start the run.
        """
        given = {_key(word) for word in words}
        command = shlex.split(self.record.command or "")
        if command[:2] != ["runner", "train"]:
            why = f"What started this one says no words of its request: {self.record.command}"
            raise_problems([Problem("--from", self.run_dir, "must be a run of runner train", why)])
        typed = self.record.extras.get("overrides", command[2:])  # the jobs of a sweep have words of their own
        kept = [word for word in typed if _key(word) not in {*given, "run_dir", "resume"}]
        return (*kept, *words)

    def projection(self, plan: RunPlan, config: RunConfig) -> Projection:
        """What the run says of a plan.

        Args:
            plan: the plan of another request.
            config: that request.

        Raises:
            RequestError: the plan is of another model, or of another machine than the run's.
        """
        ran = self.record.config
        named = {"model.target": config.model.target, "hardware.name": config.hardware.name}
        for path, value in named.items():
            section, _, key = path.partition(".")
            if value != ran[section][key]:
                why = f"The run's is {ran[section][key]}, whose seconds say nothing of another one"
                raise_problems([Problem(path, value, "must be that of the run that --from names", why)])
        if plan.profile.seconds_source != "measured":
            why = "Seconds that are estimated from FLOPs have another error than those that the run was predicted from"
            raise_problems([Problem("--from", self.run_dir, "needs layers that are measured here", why)])
        measured, parts = self.record.step_seconds, self.record.seconds
        fixed = sum(parts[name] or 0.0 for name in _FIXED)

        def ratio(seconds: float) -> float:
            return max(0.0, seconds - fixed) / self.predicted

        low, median, high = (plan.time.step_seconds * ratio(measured[key]) + fixed for key in ("p10", "median", "p90"))
        return Projection(self.run_dir, ratio(measured["median"]), fixed, low, median, high)


def measured_run(run_dir: Path) -> MeasuredRun:
    """The run of a directory.

    Raises:
        RequestError: it is no run's directory, or the run has too few steps.
    """
    if not (run_dir / RECORD_FILE).exists():
        raise RequestError([Problem("--from", run_dir, "must be a run's directory", f"It has no {RECORD_FILE}")])
    record = RunRecord.load(run_dir)
    steps = len(record.step_seconds.get("all") or ())
    if steps < _FEWEST_STEPS or record.seconds.get("rest") is None:
        why = f"It has {steps}, beside those at its start"
        fix = "trainer.max_steps=20 in that run"
        raise RequestError([Problem("--from", run_dir, f"must have {_FEWEST_STEPS} measured steps", why, fix)])
    try:
        predicted = RunPlan.load(run_dir).time.step_seconds
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RequestError([Problem("--from", run_dir, "must have its plan", f"It cannot be read: {error}")]) from error
    return MeasuredRun(run_dir, record, predicted)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
