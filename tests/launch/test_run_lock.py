"""One command at a time works in a run's directory; who holds it is named, and a dead owner's lock is taken over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import OVERRIDES, Started, command, environment, wait_for

from runner.launch.run import lock
from runner.launch.run.lock import LOCK_FILE, Incarnation, InUseError, alone_in, refuse_if_in_use
from runner.record import RunRecord

HOLD = """
import sys, time
from pathlib import Path
from runner.launch.run.lock import alone_in
with alone_in(Path(sys.argv[1]), "runner train resume=auto"):
    Path(sys.argv[1], "held").write_text("yes")
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heart that beats a hundred times as fast."""
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "SURE_SECONDS", 0.2)
    monkeypatch.setattr(lock, "SILENT_SECONDS", 0.6)


@contextlib.contextmanager
def other_process(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the directory."""
    (directory / "held").unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], env=environment())
    try:
        wait_for([directory / "held"])
        yield process
    finally:
        process.kill()
        process.wait()


def _edit(directory: Path, **changes: Any) -> None:
    """Make the lock one of another machine, process or command."""
    file = directory / LOCK_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _left(directory: Path, incarnation: Incarnation | None = None, **changes: Any) -> None:
    """A lock whose owner did not release it."""
    (directory / LOCK_FILE).unlink(missing_ok=True)
    with alone_in(directory, "runner train", incarnation):
        text = (directory / LOCK_FILE).read_text()
    (directory / LOCK_FILE).write_text(text)
    _edit(directory, **changes)


def test_another_command_is_named_and_its_death_frees_the_directory(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        with pytest.raises(InUseError) as refused, alone_in(tmp_path, "a second"):
            pass
        said = str(refused.value)
        assert f"Process {process.pid} on {os.uname().nodename} holds it since 20" in said
        assert "runner train resume=auto" in said
        with pytest.raises(InUseError):
            refuse_if_in_use(tmp_path)
        process.send_signal(signal.SIGSTOP)  # stopped is not dead
        with pytest.raises(InUseError), alone_in(tmp_path, "a second"):
            pass
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has asked for its end yet
        refuse_if_in_use(tmp_path)
        with alone_in(tmp_path, "a second"):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_process_number_that_is_used_again_is_not_the_owner(tmp_path: Path) -> None:
    _left(tmp_path, started="1")
    with alone_in(tmp_path, "a second"):
        pass
    _left(tmp_path)  # by this process, which lives
    with pytest.raises(InUseError), alone_in(tmp_path, "a second"):
        pass


@pytest.mark.parametrize("where", [{"host": "n7"}, {"kernel": "another boot pid:[1]"}])
def test_the_owner_on_another_machine_is_known_by_its_heartbeat(where: dict[str, str], tmp_path: Path) -> None:
    _left(tmp_path, None, pid=1, **where)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.05):
            os.utime(tmp_path / LOCK_FILE)

    beating = threading.Thread(target=beat)
    beating.start()
    os.utime(tmp_path / LOCK_FILE, (1, 1))  # a clock that goes wrong does not make it dead
    with pytest.raises(InUseError), alone_in(tmp_path, "a second"):
        pass
    done.set()
    beating.join()
    start = time.monotonic()
    with alone_in(tmp_path, "a second"):
        assert time.monotonic() - start > 0.5  # it was waited for


def test_a_writer_that_died_while_it_wrote_its_name_holds_nothing(tmp_path: Path) -> None:
    for text in ("", '{"host": "n7"', "[]", '{"pid": "x", "incarnation": null}'):
        (tmp_path / LOCK_FILE).write_text(text)
        with alone_in(tmp_path, "a second"):
            pass


def test_a_job_that_is_queued_again_takes_over_from_its_own_earlier_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SILENT_SECONDS", 600.0)
    _left(tmp_path, Incarnation("slurm 12.0", 3), host="n7")
    with alone_in(tmp_path, "runner train", Incarnation("slurm 12.0", 4)):
        pass
    monkeypatch.setattr(lock, "SILENT_SECONDS", 0.3)
    for other in (Incarnation("slurm 12.0", 3), Incarnation("slurm 13.0", 4), None):
        _left(tmp_path, Incarnation("slurm 12.0", 3))
        with pytest.raises(InUseError), alone_in(tmp_path, "runner train", other):
            pass


def test_of_many_that_take_over_a_dead_lock_one_gets_it(tmp_path: Path) -> None:
    for _ in range(5):
        _left(tmp_path, started="1")
        together, leave = threading.Barrier(6), threading.Event()
        outcomes: list[str] = []

        def start(together: threading.Barrier, leave: threading.Event, outcomes: list[str]) -> None:
            together.wait()
            try:
                with alone_in(tmp_path, "one of many"):
                    outcomes.append("got it")
                    leave.wait(300)
            except InUseError:
                outcomes.append("refused")

        threads = [threading.Thread(target=start, args=(together, leave, outcomes)) for _ in range(6)]
        for thread in threads:
            thread.start()
        while len(outcomes) < 6:
            time.sleep(0.01)
        leave.set()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["got it", *["refused"] * 5]


def test_an_owner_whose_lock_was_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    """Its machine was suspended: it finds another owner's name when it continues."""
    with other_process(tmp_path) as process:
        _edit(tmp_path, host="n7", token="another")
        assert process.wait(300) == 1
    assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] == "another"  # which it leaves alone


@pytest.mark.costly
def test_a_second_command_ends_with_status_2_and_the_first_goes_on(tmp_path: Path) -> None:
    request = (*OVERRIDES, "parallelism.pipeline=2", "run_dir=run", "device=cpu", "resume=auto")
    first = Started(command("train", *request, entry="step_until_told"), tmp_path)
    run = tmp_path / "run"
    wait_for([run / "pid_0", run / "pid_1"])
    while RunRecord.load(run).config:  # rank 0 writes a record of its own
        time.sleep(0.02)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-9.ckpt").write_text("of the first, which is not done with it")
    before = (run / "record.json").read_bytes()
    status, _, said = Started(command("train", *request, entry="succeed"), tmp_path).finish()
    assert status == 2, said
    assert f"run_dir = {run}: must not be in use by another command. Process {first.process.pid} on " in said
    assert "Traceback" not in said
    assert (run / "record.json").read_bytes() == before
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-9.ckpt"]
    assert first.process.poll() is None
    first.process.kill()  # what it held is free at once
    first.finish()
    (run / "checkpoints" / "step-9.ckpt").unlink()
    status, _, said = Started(command("train", *request, entry="succeed"), tmp_path).finish()
    assert status == 0, said
    assert not (run / LOCK_FILE).exists()
