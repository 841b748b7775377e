"""The command as a user starts it: what it imports, and that mistakes show no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.optim.catalogue.registry import OPTIMIZERS

HEAVY = ("torch", "lightning", "deepspeed", "numpy", "matplotlib", "tensorboard", "scipy")


def run(
    *words: str, code: str = "", directory: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "runner", *words]
    root = str(Path(__file__).resolve().parents[2])
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), **environment}
    return subprocess.run(start, capture_output=True, text=True, env=own, cwd=directory, timeout=1500, check=False)


def imported_by(line: list[str]) -> tuple[int, set[str]]:
    """Status of a command in a fresh interpreter, and the top-level modules that it imported."""
    code = f"""
import sys
from runner.cli.main import main
status = main({line!r})
print("\\n", status, *{{name.partition(".")[0] for name in sys.modules}})
"""
    words = run(code=code).stdout.splitlines()[-1].split()
    return int(words[0]), set(words[1:])


@pytest.mark.costly
@pytest.mark.parametrize(
    "line", [[], *([name, "--help"] for name in ("train", "plan", "schedule", "verify", "report", "export", "doctor"))]
)
def test_help_imports_nothing_heavy(line: list[str]) -> None:
    status, modules = imported_by(line)
    assert status == 0
    assert not modules & {*HEAVY, "hydra", "omegaconf", "yaml", "rich"}


def test_schedule_imports_no_torch() -> None:
    line = ["schedule", "schedule=1f1b", "parallelism.pipeline=8", "schedule.microbatches=16", "--json"]
    status, modules = imported_by(line)
    assert status == 0
    assert not modules & {*HEAVY, "rich"}


@pytest.mark.costly
def test_wrong_requests_import_no_torch() -> None:
    for command in ("train", "plan"):
        status, modules = imported_by([command, "model=gpt", "sede=1"])
        assert status == 2
        assert not modules & set(HEAVY)


def test_a_wrong_request_shows_no_traceback(tmp_path: Path) -> None:
    done = run("train", "modle=gpt", "optimizer=adm", directory=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "modle = gpt: there is no such key. Try model=gpt.",
        f"optimizer = adm: there is no such option. optimizer has {', '.join(sorted(OPTIMIZERS))}. Try optimizer=adam.",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_whole_traceback_is_there_for_who_asks(tmp_path: Path) -> None:
    done = run("train", "modle=gpt", directory=tmp_path, RUNNER_FULL_ERROR="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m runner train --help | head -n 1"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        timeout=1500,
        check=True,
    )
    assert done.stdout.startswith("runner train")
    assert done.stderr == ""
