"""The fault campaign: what it asks for, what it would find, and a small campaign."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.recipes.faults.array import FACTORS, LENGTH, chains, possible_pairs, rows
from runner.recipes.faults.calls import Calls
from runner.recipes.faults.judge import Ended, complaints
from runner.recipes.faults.kinds import KINDS
from runner.recipes.faults.layouts import FORMS, LAYOUTS, MAX_STEPS
from runner.recipes.faults.places import PLACES, Place, places_of
from runner.recipes.faults.shadow import Shadow
from runner.recipes.faults.state import State
from runner.recipes.faults.table import bound
from runner.recipes.faults.values import Chain, Fault


def test_the_array_covers_the_pairs_of_values() -> None:
    made = rows(400, seed=3)
    assert made[:50] == rows(50, seed=3) != rows(50, seed=4)
    possible = possible_pairs()
    covered = set().union(*(row.pairs for row in made))
    assert covered <= possible
    assert len(covered) > 0.5 * len(possible)
    assert {value for row in made for value in row.values} >= {*KINDS, *LAYOUTS, *FORMS}
    assert len(FACTORS) == len(made[0].values)


def test_every_row_becomes_a_fault_of_one_chain() -> None:
    made = rows(200, seed=1)
    found = chains(made, seed=1)
    assert sorted(str(fault) for chain in found for fault in chain.faults) == sorted(str(row.fault) for row in made)
    assert max(len(chain.faults) for chain in found) <= LENGTH
    for chain in found:
        parts = [PLACES[fault.place].part for fault in chain.faults]
        assert parts == sorted(parts)
        assert all(KINDS[fault.kind].is_restarted for fault in chain.faults if chain.restarts)
        assert Chain.from_json(chain.to_json()) == chain


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_kind_has_a_place(kind: Any) -> None:
    suited = [layout for layout in LAYOUTS.values() if kind.suits(layout)]
    assert any(kind.where(place) for layout in suited for place in places_of(layout))
    assert kind.says


@pytest.mark.parametrize("place", [place for place in PLACES.values() if place.target], ids=lambda place: place.name)
def test_what_is_wrapped_is_there(place: Place) -> None:
    module, _, path = place.target.partition(":")
    assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(module)))


RECORD = {"status": "ok", "steps": MAX_STEPS, "reason": None}
KILLED = Fault("SIGKILL of a rank", 0, "action F", 1)


def _complaints(*faults: Fault, status: int | None = 0, said: str = "", saved: int = 0) -> list[str]:
    return list(complaints(Ended(status, said, RECORD, saved, restarts=False), faults))


def test_what_is_promised_is_no_finding() -> None:
    assert _complaints() == []
    killed = Ended(1, "rank 0 died: SIGKILL", {"status": "failed"}, 0, restarts=False)
    assert list(complaints(killed, [KILLED])) == []


@pytest.mark.parametrize(
    ("found", "given"),
    [
        ("did not end in time", {"status": None}),
        ("a traceback", {"said": "Traceback (most recent call last)"}),
        ("though step 8 was reported", {"said": "continuing after step 6 of x", "saved": 8}),
        ("though step 8 was reported", {"saved": 8}),
        ("without a fault", {"status": 1}),
    ],
)
def test_each_oracle_can_find_something(found: str, given: dict[str, Any]) -> None:
    assert found in "".join(_complaints(**given))


def test_a_fault_that_is_answered_otherwise_is_a_finding() -> None:
    assert "status 0 after" in _complaints(KILLED)[0]
    untold = Ended(1, "something went wrong", {"status": "failed"}, 0, restarts=False)
    assert "nothing names the cause" in next(complaints(untold, [KILLED]))
    unrecorded = Ended(1, "rank 0 died: SIGKILL", {"status": "running"}, 0, restarts=False)
    assert "the record says running" in next(complaints(unrecorded, [KILLED]))


def test_any_of_several_faults_may_have_ended_the_command() -> None:
    """A clock that jumps while a command stops because of a killed rank does not change how it ends."""
    later = Fault("clock jumps ahead", 0, "phase save", 1)
    killed = Ended(1, "rank 0 died: SIGKILL", {"status": "failed"}, 0, restarts=False)
    assert list(complaints(killed, [KILLED, later])) == []
    assert "should harm nothing" in next(complaints(killed, [later]))
    assert "it went on after" in _complaints(KILLED, later)[0]


def test_a_rank_that_is_killed_when_a_stopped_command_has_done_its_work_changes_nothing() -> None:
    stopped = Fault("TERM then TERM to the command", 0, "hook teardown", 1)
    at_exit = Fault("SIGKILL of a rank", 0, "phase exit", 1)
    assert _complaints(stopped, at_exit) == []
    assert _complaints(stopped, at_exit, stopped) == []
    assert "status 0 after" in _complaints(at_exit)[0]
    assert "status 0 after" in _complaints(stopped, KILLED)[0]


def test_a_bound_is_that_of_nothing_found() -> None:
    assert bound(0) == 1.0
    assert (1 - bound(1000)) ** 1000 == pytest.approx(0.05)


def test_what_processes_tell_each_other_survives_them(tmp_path: Path) -> None:
    first = State(tmp_path / "state")
    first.happened = 3
    for rank in (0, 1):
        first.acknowledge(rank, 4 + rank)
    again = State(tmp_path / "state")
    assert (again.happened, again.acknowledged(2)) == (3, 4)
    again.forget(2)
    assert first.acknowledged(2) == 2


class _Counter:
    """Stands for the injector: the n-th call of a name fails."""

    role = "rank"

    def __init__(self, tmp_path: Path, fails: str = "", number: int = 0) -> None:
        self.state = State(tmp_path / "state")
        self.seen: list[str] = []
        self._fails, self._number = fails, number

    def reached(self, call: str) -> None:
        self.seen.append(call)
        if call == self._fails and self.seen.count(call) == self._number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_calls_on_files_of_the_run_are_counted_and_fail(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    counter = _Counter(tmp_path, "call write", 2)
    calls = Calls(counter, run, None, syncs_directories=True)  # type: ignore[arg-type]
    with calls.open(run / "a", "w") as file:
        file.write("one")
    with pytest.raises(OSError, match="Input/output"), calls.open(run / "a", "a") as file:
        file.write("two")
    with calls.open(tmp_path / "b", "w") as file:
        file.write("elsewhere")
    assert counter.seen == ["call open", "call write", "call open", "call write", "call write"], "a close writes again"
    assert (run / "a").read_text() == "onetwo", "Python writes what is left when it closes the file"
    counter.state.errno = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        calls.open(run / "c", "w")


def _sync(shadow: Shadow, path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    shadow.synced(handle)
    os.close(handle)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def test_power_loss_keeps_what_was_synced_and_nothing_else(tmp_path: Path, run: Path) -> None:
    shadow = Shadow(tmp_path / "shadow", run)
    (run / "kept").write_text("old")
    (run / "named").write_text("its content is not synced")
    (run / "below").mkdir()
    _sync(shadow, run / "kept")
    _sync(shadow, run)
    (run / "kept").write_text("new")
    (run / "new").write_text("it has no name on the disk")
    _sync(shadow, run / "new")
    (run / "below" / "inner").write_text("its folder was not synced")
    shadow.lose_power(None)
    assert sorted(path.name for path in run.rglob("*")) == ["below", "kept", "named"]
    assert ((run / "kept").read_text(), (run / "named").read_text()) == ("old", "")


def test_power_loss_may_bring_back_what_was_deleted(tmp_path: Path, run: Path) -> None:
    shadow = Shadow(tmp_path / "shadow", run)
    (run / "old").write_text("old")
    _sync(shadow, run / "old")
    _sync(shadow, run)
    (run / "old").unlink()
    (run / "new").write_text("another file, which must not get the number of the old one")
    _sync(shadow, run / "new")
    shadow.lose_power(None)
    assert {path.name: path.read_text() for path in run.iterdir()} == {"old": "old"}
    _sync(shadow, run)
    shadow.lose_power(None)
    assert (run / "old").read_text() == "old", "what the machine found at its start is on the disk"


def _campaign(out: Path, *words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner.recipes.faults", "--out", str(out), "--patience", "3", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.full
def test_a_few_faults(tmp_path: Path) -> None:
    kinds = ("SIGKILL of a rank", "SIGKILL of the command", "TERM to the command", "power", "checkpoint")
    done = _campaign(tmp_path, "--faults", "4", "--layouts", "1f1b", "--kinds", *kinds, seconds=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "table.md").exists()
    assert (tmp_path / "table.svg").exists()
    assert list((tmp_path / "chains").iterdir()) == [], "chains without findings are removed"
