"""Ranks that share their imports behave as executed ones, and leave nothing behind either."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from launch_helpers import HERE, OVERRIDES, Started, wait_for

from runner.config.compose.resolve import resolve
from runner.launch.local.forked import Forked, Template
from runner.launch.local.ranks import import_ahead
from runner.launch.processes.supervise import ProcessSpec
from runner.record import RunRecord

RANKS = (*OVERRIDES, "parallelism.pipeline=2", "run_dir=run", "device=cpu")


def _start(directory: Path, entry: str, monkeypatch: pytest.MonkeyPatch, on_import: str = "") -> Started:
    monkeypatch.setenv("RUNNER_TEST_IMPORT", on_import)
    executed = on_import != "raises"  # the others ask how their process was started
    return Started([sys.executable, str(HERE / "launch_main.py"), "ranks", entry, *RANKS], directory, executed=executed)


def _finish(directory: Path, entry: str, monkeypatch: pytest.MonkeyPatch, on_import: str = "") -> tuple[int, str]:
    started = _start(directory, entry, monkeypatch, on_import)
    status, _, err = started.finish()
    assert started.left_behind() == []
    return status, err


@pytest.mark.costly
def test_a_forked_rank_finds_what_an_executed_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both listen at the loopback alone, and meet under a secret, so that other users of the machine cannot join."""
    status, err = _finish(tmp_path, "describing_entries:describe", monkeypatch)
    assert status == 0, err
    first, second = (json.loads((tmp_path / "run" / f"found_{rank}.json").read_text()) for rank in range(2))
    assert [first["origin"], second["origin"]] == ["runner.launch.local.template"] * 2
    assert [first["name"], second["name"]] == ["rank 0", "rank 1"]
    assert [first["rank"], second["rank"]] == [["0", "0", 0, 0], ["1", "1", 1, 1]]
    assert [first["store"], second["store"]] == [True, False]
    assert first["leads"]
    assert second["leads"]
    assert first["files"][0] == second["files"][0] == "null"
    assert second["files"][1] == "rank_1.log"
    assert "hello from rank 1" in (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    assert first["caught"] == second["caught"] == []
    told = json.loads((tmp_path / "run" / "told.json").read_text())
    assert told["sockets"] > 0
    assert told["elsewhere"] == []
    assert told["seen_by_a_stranger"] is False
    assert len(told["token"]) == 32
    assert all(told["token"] not in path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.y*ml"))
    assert all(one != other for one, other in zip(first["drawn"], second["drawn"], strict=True))


@pytest.mark.costly
def test_where_no_rank_can_be_forked_each_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The imports have begun a thread, whose locks a forked process would keep for ever."""
    status, err = _finish(tmp_path, "importing_entries:tell_origin", monkeypatch, "begins a thread")
    assert status == 0, err
    assert [(tmp_path / "run" / f"origin_{rank}").read_text() for rank in range(2)] == ["runner.launch.rank"] * 2
    assert "each imports by itself" not in err


def test_an_import_that_fails_is_told_as_a_ranks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, err = _finish(tmp_path, "importing_entries:tell_origin", monkeypatch, "raises")
    assert status == 1
    told = "(stage 0, layers 4..7) failed: ModuleNotFoundError: No module named 'tensors' (importing_entries.py:"
    assert told in err
    assert "Traceback" not in err
    assert "No module named 'tensors'" in str(RunRecord.load(tmp_path / "run").reason)


@pytest.mark.costly
def test_the_command_can_be_ended_while_ranks_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = _start(tmp_path, "importing_entries:tell_origin", monkeypatch, "waits")
    wait_for([tmp_path / "importing"])
    started.process.send_signal(signal.SIGINT)
    status, _, err = started.finish(timeout=1500)  # the import takes 3000 s
    assert started.left_behind() == []
    assert status == 130
    assert "stopped by SIGINT" in err
    assert RunRecord.load(tmp_path / "run").status == "interrupted"


_SMALL_TEMPLATE = """
import json, os, signal, socket, sys, time
forks, orders, tell, gate = map(int, sys.argv[1:])
count = json.loads(socket.recv_fds(socket.socket(fileno=orders), 999, 1)[0])["count"]
for rank in range(forks):
    if os.fork() == 0:
        os.setsid()
        os.write(tell, b"%d %d\\n" % (rank, os.getpid()))
        os.close(tell)
        began = os.read(gate, 1)
        os._exit(10 + rank if began and os.getppid() == int(os.environ["RUNNER_PARENT_PID"]) else 1)
if forks == 0:
    time.sleep(60)
if forks < count:
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(0)
"""


def _fork_small(forks: int, is_told_to_stop: Callable[[], bool] = lambda: False) -> Sequence[Forked]:
    template = Template(ProcessSpec([sys.executable, "-c", _SMALL_TEMPLATE, str(forks)], {}))
    return template.fork({"count": 2}, [0], 2, is_told_to_stop)


def test_what_the_template_forks_becomes_this_process_s_own() -> None:
    ranks = _fork_small(2)
    assert [rank.wait() for rank in ranks] == [10, 11]
    assert [rank.poll() for rank in ranks] == [10, 11]


def test_a_template_that_dies_between_two_ranks_leaves_none(caplog: pytest.LogCaptureFixture) -> None:
    before = _children()
    assert list(_fork_small(1)) == []
    assert "ended with SIGKILL: each imports by itself" in caplog.text
    assert _children() == before


def test_a_template_is_ended_when_its_command_is_told_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    """It would sleep and then end by itself, which is another line in the log."""
    before, asked = _children(), iter([False, False])
    assert list(_fork_small(0, lambda: next(asked, True))) == []
    assert caplog.text == ""
    assert _children() == before


def test_a_template_that_hangs_is_ended_and_the_ranks_import_themselves(caplog: pytest.LogCaptureFixture) -> None:
    before = _children()
    template = Template(ProcessSpec([sys.executable, "-c", _SMALL_TEMPLATE, "0"], {}))
    assert list(template.fork({"count": 2}, [0], 2, lambda: False, 0.3)) == []
    assert "ended with SIGKILL: each imports by itself" in caplog.text
    assert _children() == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_imported_ahead_for_a_request_that_is_not_run_ends_with_it(ranks: int) -> None:
    before = _children()
    config = resolve(["model=mlp", f"parallelism.pipeline={ranks}", "device=cpu"])
    with import_ahead(config, "runner.training.run:run_rank") as template:
        assert template is not None
        assert _children() != before
    assert _children() == before


@pytest.mark.parametrize("word", ["device=cuda", "schedule.microbatches=0"])
def test_nothing_is_imported_ahead_for_cuda_and_for_a_wrong_request(word: str) -> None:
    before = _children()
    config = resolve(["model=mlp", "parallelism.pipeline=2", "device=cpu", word])
    with import_ahead(config, "runner.training.run:run_rank") as template:
        assert template is None
        assert _children() == before


def _children() -> str:
    """Of this thread; those that have ended count until they are waited for."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
