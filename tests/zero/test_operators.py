"""DeepSpeed's operators are compiled once, by one process, whatever an earlier one left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner.config.compose.resolve import resolve
from runner.config.deepspeed import deepspeed_settings
from runner.errors import RequestError
from runner.optim import operators
from runner.optim.operators import needed_operators, ready_operators

ROOT = Path(__file__).resolve().parents[2]
USE = """
import logging, os
logging.basicConfig(level=logging.INFO, format="%(message)s")
os.environ["DS_ACCELERATOR"] = "cpu"
from runner.optim import operators
operators._PARTS = {"pin_memory": {"pin_memory": "PinMemoryBuilder"}}  # the one that is compiled fastest
operators.ready_operators(["pin_memory"], accelerator="cpu")
import deepspeed
from torch.utils import cpp_extension
cpp_extension.load = None  # whoever compiles here fails
operators.load_operators(["pin_memory"], accelerator="cpu")
from deepspeed.ops.op_builder import PinMemoryBuilder
print("loaded", PinMemoryBuilder().load().pin_handle())
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["zero.stage=0"], ()),
        (["zero.stage=2", "offload.optimizer=cpu"], ()),
        (["zero.stage=3", "offload=nvme", "offload.nvme_path=/drive"], ("async_io",)),
        (["zero.stage=3", "offload.parameters=nvme", "offload.nvme_path=/drive"], ("async_io",)),
    ],
)
def test_a_drive_needs_async_io_and_nothing_else_needs_any(overrides: list[str], expected: tuple[str, ...]) -> None:
    settings = deepspeed_settings(resolve(["model=gpt", *overrides]), accelerated=False)
    assert needed_operators(settings) == expected


@pytest.mark.costly
def test_a_failed_build_is_a_refusal_with_the_compilers_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(RequestError) as refusal:
        ready_operators(["async_io"], accelerator="cpu")
    (problem,) = refusal.value.problems
    assert problem.line().startswith("offload = nvme: needs DeepSpeed's async_io operator. Compiling it failed, see ")
    assert problem.why.endswith("/no/such/compiler: not found")
    assert not list(tmp_path.glob("runner/*unfinished*"))


@pytest.mark.full
def test_one_process_compiles_and_what_a_killed_one_left_stops_nobody(tmp_path: Path) -> None:
    log = tmp_path / "killed.log"
    killed = start(tmp_path, log)
    until(lambda: list(tmp_path.glob("runner/pin_memory-*-unfinished-*/pin_memory/lock")), killed)  # torch's
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert list(tmp_path.glob("runner/pin_memory-*-unfinished-*"))

    logs = [tmp_path / f"{number}.log" for number in range(2)]
    both = [start(tmp_path, log) for log in logs]
    assert [process.wait(timeout=1500) for process in both] == [0, 0], "".join(log.read_text() for log in logs)
    told = [log.read_text() for log in logs]
    assert sum("compiling DeepSpeed's pin_memory operator" in text for text in told) == 1
    assert all("loaded" in text for text in told)
    assert not list(tmp_path.glob("runner/*unfinished*"))


def start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-c", USE], env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def until(found: Any, process: subprocess.Popen[bytes]) -> None:
    while not found():
        assert process.poll() is None, "it ended before it compiled"
        time.sleep(0.05)


def test_the_parts_are_built_by_classes_that_deepspeed_has() -> None:
    from deepspeed.ops import op_builder as builders

    for parts in operators._PARTS.values():
        assert [hasattr(builders, builder) for builder in parts.values()] == [True] * len(parts)
