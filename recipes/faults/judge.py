"""Judges how a command ended: its status, what it told, and from where it had gone on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.recipes.faults.kinds import KINDS, Kind
from runner.recipes.faults.layouts import MAX_STEPS
from runner.recipes.faults.places import PLACES, Part
from runner.recipes.faults.values import Fault

__all__ = ["Ended", "complaints"]

_STATUS = {0: "ok", 1: "failed", 75: "preempted", 130: "interrupted"}
_CONTINUES = re.compile(r"continuing after step (\d+) of")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Args:
        status: its exit status, negative for a signal; None if it had to be killed after its limit of time.
        said: its output and errors.
        record: what the run's record says.
        acknowledged: the newest step that was reported as saved before the command began.
        restarts: whether the command starts failed ranks again itself.
    """

    status: int | None
    said: str
    record: dict[str, Any]
    acknowledged: int
    restarts: bool


def complaints(ended: Ended, faults: Sequence[Fault]) -> Iterator[str]:
    """A line for everything that is not as it must be.

    Args:
        faults: those that were injected while the command ran, in order. A fault may come while the command ends
            because of an earlier one, so that any of them may have decided its end.
    """
    if ended.status is None:
        yield "it did not end in time"
        return
    if "Traceback (most recent call last)" in ended.said:
        yield "a traceback is shown"
    yield from _lost_steps(ended)
    for number, fault in enumerate(faults[:-1]):
        kind = KINDS[fault.kind]
        if _is_too_late(faults[: number + 1]):
            continue
        if ended.status == 0 and not _may_go_on(kind, ended):
            yield f"it went on after {fault}"
        elif ended.status == 0 and not kind.may_go_on and kind.answer is not None and not _is_told(kind, ended.said):
            yield f"nothing names the cause of {fault}, after which the ranks were started again"
    last = faults[-1] if faults and not _is_too_late(faults) else None
    yield from _of_success(ended, last) if ended.status == 0 else _of_failure(ended, faults)


def _is_too_late(faults: Sequence[Fault]) -> bool:
    """Whether the last of these faults finds a rank that has done all its work, after the command was told to stop.

    A command that is told to stop may itself end such a rank. The record decides then, which must be complete.
    """
    *earlier, last = faults
    stopped = any("to the command" in fault.kind for fault in earlier)
    return stopped and last.place == "phase exit"


def _lost_steps(ended: Ended) -> Iterator[str]:
    """Steps that were reported as saved must be there."""
    found = _CONTINUES.search(ended.said)
    step = int(found[1]) if found is not None else 0
    if step < ended.acknowledged and (found is not None or ended.status == 0):
        yield f"it went on from step {step}, though step {ended.acknowledged} was reported as saved"


def _may_go_on(kind: Kind, ended: Ended) -> bool:
    return kind.answer is None or kind.may_go_on or (ended.restarts and kind.is_restarted)


def _is_told(kind: Kind, text: str) -> bool:
    words = kind.answer.told if kind.answer is not None else ()
    return not words or any(word in text for word in words)


def _of_success(ended: Ended, last: Fault | None) -> Iterator[str]:
    if last is not None and not _may_go_on(KINDS[last.kind], ended):
        yield f"status 0 after {last}"
    if ended.record.get("status") != "ok" or ended.record.get("steps") != MAX_STEPS:
        yield f"status 0, but the record says {ended.record.get('status')} after {ended.record.get('steps')} steps"


def _of_failure(ended: Ended, faults: Sequence[Fault]) -> Iterator[str]:
    if not faults:
        yield f"status {ended.status} without a fault: {_last_line(ended.said)}"
        return
    kinds = [KINDS[fault.kind] for fault in faults if KINDS[fault.kind].answer is not None]
    shown = ", ".join(map(str, faults))
    if not kinds:
        yield f"status {ended.status} after {shown}, which should harm nothing: {_last_line(ended.said)}"
        return
    exits = {status for kind in kinds if kind.answer is not None for status in kind.answer.exits}
    if ended.status not in exits:
        yield f"status {ended.status} after {shown}, not {sorted(exits)}: {_last_line(ended.said)}"
    if not any(_is_told(kind, f"{ended.said}{ended.record.get('reason')}") for kind in kinds):
        yield f"nothing names the cause of {shown}: {_last_line(ended.said)}"
    expected = _STATUS.get(ended.status or 0)
    if expected is not None and all(map(_has_record, faults)) and ended.record.get("status") != expected:
        yield f"the record says {ended.record.get('status')} and not {expected} after {shown}"


def _has_record(fault: Fault) -> bool:
    """Whether the fault came when the record was the present command's, and could be written."""
    place = PLACES[fault.place]
    return not (place.role == "command" and place.part is Part.START) and fault.kind != "disk stays full"


def _last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(no output)"
