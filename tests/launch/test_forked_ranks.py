"""Ranks that share their imports behave as executed ones, and leave nothing behind either."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import user_code
from covering import sampled
from launch_helpers import HERE, OVERRIDES, ROOT, Started, wait_for
from safetensors.torch import load_file

from runner.config.compose.resolve import resolve
from runner.launch.local import ranks as local
from runner.launch.local.forked import Forked, Template
from runner.launch.local.ranks import import_ahead
from runner.launch.local.supervise import ProcessSpec
from runner.launch.run.prepare import place_of, prepare, write_request
from runner.record import RunRecord

RANKS = (*OVERRIDES, "parallelism.pipeline=2", "run_dir=run", "device=cpu")


def _start(directory: Path, entry: str, monkeypatch: pytest.MonkeyPatch, on_import: str = "") -> Started:
    monkeypatch.setenv("RUNNER_TEST_IMPORT", on_import)
    return Started([sys.executable, str(HERE / "launch_main.py"), "ranks", entry, *RANKS], directory, executed=True)


def _finish(directory: Path, entry: str, monkeypatch: pytest.MonkeyPatch, on_import: str = "") -> tuple[int, str]:
    started = _start(directory, entry, monkeypatch, on_import)
    status, _, err = started.finish()
    assert started.left_behind() == []
    return status, err


@pytest.mark.slow
def test_a_forked_rank_finds_what_an_executed_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert all(one != other for one, other in zip(first["drawn"], second["drawn"], strict=True))


@pytest.mark.full
def test_forked_and_executed_ranks_train_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, shuffled data, a loader's workers and a validation; also where imports ahead are not used."""
    words = ["model.target=user_code:model", "+model.kwargs.dropout=0.1", "data.target=user_code:points"]
    words += ["loss.target=user_code:mean", "data.shuffle=true", "data.workers=1", "trainer.val_every=2"]
    words += ["parallelism.pipeline=2", "schedule.microbatches=2", "data.batch_size=8", "trainer.max_steps=3"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(Path(user_code.__file__).parent)]))
    runs = {}
    for name, forks in {"forked": True, "executed": False}.items():
        monkeypatch.setattr(local, "_may_fork", lambda launch, forks=forks: forks)
        run_dir = tmp_path / name
        config = resolve([*words, "logger=none", "device=cpu", f"run_dir={run_dir}"])
        plan = prepare(config)
        run_dir.mkdir()
        file = write_request(config, plan, run_dir, command="test")
        with import_ahead(config, "runner.training.run:run_rank") as template:
            outcome = local.run_ranks(local.Launch(file, run_dir, 2, 1, place_of(plan)), template)
        assert outcome.exit_status == 0, outcome.messages
        runs[name] = RunRecord.load(run_dir), load_file(run_dir / "weights.safetensors")
    (forked, weights), (executed, expected) = runs["forked"], runs["executed"]
    assert len(forked.loss) == 3
    assert (forked.loss, forked.val_loss) == (executed.loss, executed.val_loss)
    assert forked.peak_memory_bytes == executed.peak_memory_bytes
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.parametrize("on_import", sampled(["begins a thread", "dies"], "begins a thread"))
def test_where_no_rank_can_be_forked_each_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_import: str
) -> None:
    status, err = _finish(tmp_path, "importing_entries:tell_origin", monkeypatch, on_import)
    assert status == 0, err
    assert [(tmp_path / "run" / f"origin_{rank}").read_text() for rank in range(2)] == ["runner.launch.rank"] * 2
    assert ("ended with SIGKILL: each imports by itself" in err) == (on_import == "dies")


def test_an_import_that_fails_is_told_as_a_ranks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, err = _finish(tmp_path, "importing_entries:tell_origin", monkeypatch, "raises")
    assert status == 1
    told = "(stage 0, layers 4..7) failed: ModuleNotFoundError: No module named 'tensors' (importing_entries.py:"
    assert told in err
    assert "Traceback" not in err
    assert "No module named 'tensors'" in str(RunRecord.load(tmp_path / "run").reason)


@pytest.mark.parametrize("number", sampled([signal.SIGINT, signal.SIGKILL], signal.SIGINT))
def test_the_command_can_be_ended_while_ranks_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started = _start(tmp_path, "importing_entries:tell_origin", monkeypatch, "waits")
    wait_for([tmp_path / "importing"])
    told_at = time.monotonic()
    started.process.send_signal(number)
    status, _, err = started.finish()
    assert time.monotonic() - told_at < 10
    assert started.left_behind() == []
    assert status == (130 if number is signal.SIGINT else -number)
    if number is signal.SIGINT:
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
    before, began_at = _children(), time.monotonic()
    assert list(_fork_small(0, lambda: time.monotonic() > began_at + 0.5)) == []
    assert time.monotonic() - began_at < 20
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


@pytest.mark.full
def test_what_is_imported_for_all_ranks_does_not_ask_for_one(tmp_path: Path) -> None:
    """But for two modules, in which every rank puts its number."""
    done = subprocess.run([sys.executable, "-c", _READERS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1].split() == ["prints.py", "rank_zero.py"]


_READERS = """
import os, sys
readers = set()
def noting(read):
    def noted(self, name, *default):
        if name in ("RANK", "LOCAL_RANK", "RUNNER_STORE_FD"):
            frame = sys._getframe(1)
            while frame.f_code.co_filename.startswith("<frozen"):
                frame = frame.f_back
            readers.add(os.path.basename(frame.f_code.co_filename))
        return read(self, name, *default)
    return noted
kind = type(os.environ)
kind.__getitem__, kind.__contains__ = noting(kind.__getitem__), noting(kind.__contains__)
from runner.config.compose.resolve import resolve
from runner.launch.local.template import import_all, imports_of
import_all(imports_of(resolve(["model=mlp", "zero.stage=1", "device=cpu"]), "runner.training.run:run_rank"))
assert "deepspeed" in sys.modules and "lightning.pytorch" in sys.modules
assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules and "torch._inductor.compile_fx" not in sys.modules
print(*sorted(readers))
"""
