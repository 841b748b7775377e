"""Ranks that are overdue: which have made no progress for longer than their phase may take, and where they are."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.config.schema import WATCHDOG_MARGIN_SECONDS, RunConfig
from runner.pulse import NO_PROGRESS, STACKS_SIGNAL, Phase, Pulses

__all__ = ["Overdue", "Watch", "limits_of"]

_STACKS_SECONDS = 5.0  # for the system to write a rank's stacks: a process that is not in the kernel does so at once
_STACKS_POLL = 0.1

_LIMITS = {
    Phase.START: ("launcher.start_timeout_seconds", "it did not reach its first step within {:g} s"),
    Phase.STEP: ("launcher.step_timeout_seconds", "its steps made no progress for {:g} s"),
    Phase.SAVE: ("checkpoint.timeout_seconds", "a save took longer than {:g} s"),
    Phase.EXIT: ("launcher.exit_timeout_seconds", "it did not end within {:g} s after its last step"),
    Phase.DONE: ("launcher.exit_timeout_seconds", "it did not end within {:g} s after its work was complete"),
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_RUNNER = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Overdue:
    """A process that must be ended.

    Args:
        reason: why, with the limit's key and, where it is known, the place in the user's code.
        is_done: whether its work is complete all the same.
    """

    reason: str
    is_done: bool


def limits_of(config: RunConfig) -> dict[Phase, float]:
    """The longest time without progress, in seconds, in each phase that has a limit.

    The ranks' own watchdogs, who can say more, come first.
    """
    launcher = config.launcher
    limits = {Phase.SAVE: config.checkpoint.timeout_seconds + WATCHDOG_MARGIN_SECONDS}
    if launcher.watchdog_seconds is not None:
        limits[Phase.STEP] = launcher.message_timeout_seconds
    if launcher.start_timeout_seconds is not None:
        limits[Phase.START] = launcher.start_timeout_seconds
    if launcher.exit_timeout_seconds is not None:
        limits[Phase.EXIT] = limits[Phase.DONE] = launcher.exit_timeout_seconds
    return limits


@dataclass
class Watch:
    """Reads the pulses of processes.

    Args:
        pulses: theirs, in the order of the processes.
        limits: see :func:`limits_of`.
    """

    pulses: Pulses
    limits: Mapping[Phase, float]
    _seen: dict[int, tuple[Phase, int]] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)

    def overdue(self, alive: Sequence[int], now: float) -> list[int]:
        """The numbers of those processes that have shown no progress for longer than their phase may take.

        Args:
            alive: the numbers of the processes that run.
            now: the time of a :class:`runner.pulse.PollClock`.
        """
        for number in alive:
            pulse = self.pulses.of(number)
            if self._seen.get(number) != pulse:
                self._seen[number], self._since[number] = pulse, now
        return [number for number in alive if now - self._since[number] >= self._limit(number)]

    def judged(self, number: int, pid: int) -> Overdue:
        """What is to be told of an overdue process. It is asked for its stacks, which takes a moment."""
        phase, _ = self._seen[number]
        key, told = _LIMITS[phase]
        reason = f"{told.format(self._limit(number))} ({key}){_place(self._stacks(pid))}"
        return Overdue(reason, is_done=phase is Phase.DONE)

    def silent(self, alive: Sequence[int], failed: Sequence[int]) -> list[int]:
        """The numbers of those processes that cannot say where they are, although one has ended that waited for them.

        Args:
            alive, failed: the numbers of the processes that run, and of those that have failed by themselves.
        """
        if not any(self.pulses.said_by(number).startswith(NO_PROGRESS) for number in failed):
            return []
        return [one for one in alive if self.pulses.of(one)[0] is Phase.STEP and not self.pulses.said_by(one)]

    def judged_silent(self, pid: int) -> Overdue:
        """What is to be told of such a process. It is asked for its stacks, which takes a moment."""
        return Overdue(f"it stood still outside Python{_place(self._stacks(pid))}", is_done=False)

    def _limit(self, number: int) -> float:
        return self.limits.get(self._seen[number][0], float("inf"))

    def _stacks(self, pid: int) -> str:
        if STACKS_SIGNAL is None:
            return ""
        self.pulses.stacks()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACKS_SIGNAL)
        said, more = "", ""
        for _ in range(round(_STACKS_SECONDS / _STACKS_POLL)):
            time.sleep(_STACKS_POLL)
            more = self.pulses.stacks()
            said += more
            if said and not more:  # it has written all
                break
        return said


def _place(stacks: str) -> str:
    """The innermost frame of the user's own code in stacks as faulthandler writes them; else the innermost one."""
    frames = _FRAME.findall(stacks.partition("Current thread")[2] or stacks)
    own = [frame for frame in frames if "site-packages" not in frame[0] and not frame[0].startswith(("<", _RUNNER))]
    own = [frame for frame in own if f"{os.sep}lib{os.sep}python" not in frame[0]]
    found = (own or frames)[:1]
    return "".join(f", at {Path(file).name}:{line} in {function}" for file, line, function in found)
