"""The columns of a table of runs that say how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.config.units import format_rate, format_seconds
from runner.record import RunRecord
from runner.report.read import Run

__all__ = ["SPEEDS", "Speed", "part_name", "speeds_of"]

_UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Speed:
    """One column.

    Args:
        header, value_header: its names in the shown table, and in that of exact values.
        of: its value in a record; None if it is not known.
        told: the value as it is shown.
    """

    header: str
    value_header: str
    of: Callable[[RunRecord], float | None]
    told: Callable[[float], str]

    def cell(self, run: Run) -> str:
        """What the table shows for a run."""
        value = self.of(run.record)
        return _UNKNOWN if value is None else self.told(value)


def _bubble(record: RunRecord) -> float | None:
    """The measured idle share of ranks; one stage has no bubble."""
    return record.bubble_ratio.get("measured") if record.layout.get("pipeline") != 1 else None


SPEEDS = (
    Speed("predicted", "predicted_step_seconds", lambda record: record.step_seconds.get("predicted"), format_seconds),
    Speed("bubble", "bubble_ratio", _bubble, lambda value: f"{value:.0%}"),
    Speed("tokens/s", "tokens_per_second", lambda record: record.extras.get("tokens_per_second"), format_rate),
)


def part_name(part: str) -> str:
    """What a part of a step is called where people read it.

    The time in which ranks wait for each other is not all that they are idle, which is the bubble of a plan.
    """
    return "waiting" if part == "bubble" else part


def speeds_of(runs: Sequence[Run]) -> tuple[Speed, ...]:
    """The columns that some of the runs have a value for."""
    return tuple(speed for speed in SPEEDS if any(speed.of(run.record) is not None for run in runs))
