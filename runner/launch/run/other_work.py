"""Measures how many cores other work on this machine has had while a run's ranks ran."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

from runner.plan.cores import num_cores

__all__ = ["CoreTimes", "OtherWork"]

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # the columns of a core's line in which it does nothing: idle, and waiting for a disk
_COLUMNS = 8  # what comes after has been counted before: time of guests


class CoreTimes(NamedTuple):
    """Seconds since some moment.

    Args:
        passed: seconds of the clock.
        busy: seconds of any work on all cores that this process may use.
        own: the part of them in this process and in its children that have ended.
    """

    passed: float
    busy: float
    own: float

    @classmethod
    def now(cls, stat: Path = _STAT) -> CoreTimes | None:
        """The times now; None where the system does not tell them."""
        try:
            lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
            cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        except (OSError, AttributeError, UnicodeDecodeError):
            return None
        ticks = [[int(each) for each in line[1 : _COLUMNS + 1]] for line in lines if line and line[0] in cores]
        busy = sum(sum(each) - sum(each[column] for column in _IDLE) for each in ticks) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(time.perf_counter(), busy, sum(each.ru_utime + each.ru_stime for each in used))


class OtherWork:
    """What other work has had since this object was made."""

    def __init__(self) -> None:
        self._begun = CoreTimes.now()

    def cores(self) -> tuple[float, int] | None:
        """The mean number of cores that other work had, and the number that there are; None if that is not known.

        The ranks must have ended: what they used is known then.
        """
        begun, ended = self._begun, CoreTimes.now()
        if begun is None or ended is None or ended.passed <= begun.passed:
            return None
        others = (ended.busy - begun.busy) - (ended.own - begun.own)
        count = num_cores()
        return min(float(count), max(0.0, others / (ended.passed - begun.passed))), count
