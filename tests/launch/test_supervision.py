"""The supervisor's own clock, what it cannot end, and ranks whose watchdog cannot write."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest

from runner.engine.engine import Engine
from runner.engine.transport import sockets
from runner.errors import RunFailedError
from runner.launch.processes import supervise as supervision
from runner.launch.processes.overdue import Watch
from runner.launch.processes.supervise import supervise
from runner.pulse import MOST_SECONDS_PER_POLL, PULSES_VARIABLE, Phase, PollClock, Pulse, Pulses
from runner.record import RunRecord, hang_file
from runner.strategy.pipeline import EngineStrategy
from runner.training.watchdog import Watchdog


class _Unkillable:
    """A process as it looks in uninterruptible sleep: it gets signals and does not end."""

    def __init__(self) -> None:
        self.real = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.pid, self.returncode = self.real.pid, None

    def poll(self) -> int | None:
        return None

    def wait(self) -> int | None:
        raise AssertionError("it would take for ever")


def test_a_process_in_uninterruptible_sleep_does_not_keep_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "UNKILLABLE_SECONDS", 0.3)
    stuck, pulses = _Unkillable(), Pulses(1)
    watch = Watch(pulses, {Phase.START: 0.2})
    with caplog.at_level(logging.WARNING):
        ending = supervise([], start_together=lambda told: [stuck], grace_seconds=lambda: 0.1, watch=watch)
    stuck.real.wait(600)
    pulses.close()
    assert ending.failed == (0,)
    assert ending.returncodes == (-signal.SIGKILL,)
    assert ending.overdue[0].startswith("it did not reach its first step within 0.2 s (launcher.start_timeout_seconds)")
    assert f"process {stuck.pid} is in uninterruptible sleep" in caplog.text


def test_one_whose_work_is_complete_does_not_keep_the_command_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "UNKILLABLE_SECONDS", 0.3)
    stuck, pulses = _Unkillable(), Pulses(1)
    Pulse(pulses._memory, 0).enter(Phase.DONE)
    watch = Watch(pulses, {Phase.DONE: 0.2})
    ending = supervise([], start_together=lambda told: [stuck], grace_seconds=lambda: 0.1, watch=watch)
    stuck.real.wait(600)
    pulses.close()
    assert (ending.failed, dict(ending.overdue)) == ((), {})


def test_the_clock_stands_still_while_the_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.05, 0.1, 3600.1, 3600.15])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    clock = PollClock()
    assert [clock.tick() for _ in range(4)] == pytest.approx(
        [0.05, 0.1, 0.1 + MOST_SECONDS_PER_POLL, 0.15 + MOST_SECONDS_PER_POLL]
    )


def test_each_phase_has_its_limit_and_progress_begins_it_anew() -> None:
    pulses = Pulses(2)
    watch = Watch(pulses, {Phase.STEP: 5.0, Phase.SAVE: 50.0})
    rank = Pulse(pulses._memory, 1)
    assert watch.overdue([0, 1], 0.0) == []
    assert watch.overdue([0, 1], 1000.0) == []  # their start has no limit here
    rank.enter(Phase.STEP)
    assert watch.overdue([0, 1], 1000.0) == []
    rank.beat(1)
    assert watch.overdue([0, 1], 1004.0) == []
    assert watch.overdue([0, 1], 1008.9) == []
    with rank.within(Phase.SAVE):
        assert watch.overdue([0, 1], 1009.0) == []
        assert watch.overdue([0, 1], 1058.0) == []
        assert watch.overdue([0, 1], 1059.0) == [1]
    assert watch.overdue([0, 1], 1060.0) == []
    assert watch.overdue([0, 1], 1065.0) == [1]
    assert watch.overdue([0], 1065.0) == []  # it has ended
    pulses.close()


def test_what_a_rank_says_is_cut_to_its_slot_and_read_by_others() -> None:
    pulses = Pulses(2)
    Pulse(pulses._memory, 0).say("rank 0 " + "é" * 5000)
    Pulse(pulses._memory, 1).say("rank 1 here")
    assert pulses.said_by(0).startswith("rank 0 éé")
    assert pulses.said_by(1) == "rank 1 here"
    assert pulses.of(1) == (Phase.START, 0)
    pulses.close()


@pytest.fixture
def pulses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pulses]:
    """The memory in which this process has the only slot."""
    made = Pulses(1)
    monkeypatch.setenv(PULSES_VARIABLE, str(made.fileno()))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(Pulse, "_current", None)
    yield made
    made.close()


def _watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **times: float) -> tuple[Watchdog, list[int], Mock]:
    ends: list[int] = []
    watchdog = Watchdog(tmp_path, 0, 1, **times)

    def end(status: int) -> None:
        ends.append(status)
        watchdog.stop()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr("runner.training.watchdog._GRACE_SECONDS", 0.1)
    engine = Mock(spec=Engine, actions_begun=0)
    engine.place.return_value = ("in step 1, last at 0F0 (stage 0, layers 0..1)", "a grid")
    strategy = EngineStrategy.__new__(EngineStrategy)
    strategy.engine = engine
    watchdog.on_train_start(Mock(spec=pl.Trainer, strategy=strategy), pl.LightningModule())
    return watchdog, ends, engine


def test_a_full_disk_does_not_end_the_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pulses: Pulses) -> None:
    (tmp_path / "logs").mkdir()
    RunRecord().save(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("runner.training.watchdog.write_atomically", full)
    monkeypatch.setattr("runner.record.write_atomically", full)
    _, ends, _ = _watchdog(tmp_path, monkeypatch, report_seconds=0.2, end_seconds=0.4)
    end = time.monotonic() + 600
    while not ends and time.monotonic() < end:
        time.sleep(0.05)
    assert ends[0] == 1
    told = pulses.said_by(0)  # the supervisor reads it
    assert re.match(r"no progress for \d+ s: rank 0 in step 1, last at 0F0", told), told


def test_the_watchdog_counts_its_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pulses: Pulses) -> None:
    """The clock jumps by a day between two polls; the rank is neither told nor ended."""
    (tmp_path / "logs").mkdir()
    RunRecord().save(tmp_path)
    start, real = time.monotonic(), time.monotonic
    watchdog, ends, engine = _watchdog(tmp_path, monkeypatch, report_seconds=120.0, end_seconds=240.0)
    monkeypatch.setattr(time, "monotonic", lambda: real() + (86400.0 if real() - start > 0.5 else 0.0))
    end = real() + 600
    while pulses.of(0)[1] < 2 and real() < end:
        engine.actions_begun += 1
        time.sleep(0.6)
    watchdog.stop()
    assert ends == []
    assert not hang_file(tmp_path, 0).exists()
    assert pulses.of(0)[0] is Phase.EXIT


def test_a_peer_that_never_connects_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(Path(folder) / "rank"))
        listener.listen()
        listener.settimeout(0.2)
        with pytest.raises(RunFailedError, match=r"rank 1, 2 did not connect within 0.2 s"):
            sockets._accept(listener, 0.2, {2, 1})
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(Path(folder) / "rank"))
            with pytest.raises(RunFailedError, match=r"rank 1 did not connect within 0.2 s"):
                sockets._accept(listener, 0.2, {1})
