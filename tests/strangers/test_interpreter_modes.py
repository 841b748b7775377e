"""Interpreters without assertions or docstrings, and commands whose streams are closed or not read to the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARSED = """
from runner.config.compose.overrides import _parse
for line in {!r}:
    made = _parse(line)
    print(*made.sweep_iterator() if made.is_discrete_sweep() else [made.value()], sep="; ")
"""
OVERRIDES = {
    "a.b=range(1,4)": "1; 2; 3",
    "a.b=range(0.5,2,0.5)": "0.5; 1.0; 1.5",
    "a.b=choice(3,x)": "3; x",
    "a.b=sort(choice(3,1,2),reverse=true)": "3; 2; 1",
    "a.b={c:1,d:[2,3]}": "{'c': 1, 'd': [2, 3]}",
    "a.b=int('7')": "7",
    "~a.b": "None",
}


@pytest.mark.costly
@pytest.mark.parametrize("flags", [[], ["-O"], ["-OO"]])
def test_what_a_sweep_reads(flags: list[str]) -> None:
    """Hydra's parser moves on inside of assertions, which -O leaves out."""
    python = [sys.executable, *flags, "-c", PARSED.format(list(OVERRIDES))]
    made = subprocess.run(python, capture_output=True, text=True, check=True)
    assert dict(zip(OVERRIDES, made.stdout.splitlines(), strict=True)) == OVERRIDES


@pytest.mark.costly
@pytest.mark.parametrize("level", ["1", "2"])
@pytest.mark.parametrize("words", [["help", "schedule"], ["schedule", "schedule=zb_h1", "parallelism.pipeline=2"]])
def test_a_command_says_the_same(level: str, words: list[str]) -> None:
    said = [
        subprocess.run(
            [sys.executable, "-m", "runner", *words],
            capture_output=True, text=True, env={**os.environ, "PYTHONOPTIMIZE": optimize},
        )
        for optimize in ("", level)
    ]  # fmt: skip
    assert said[0].stdout == said[1].stdout
    assert [one.returncode for one in said] == [0, 0]


SCHEDULE = "schedule schedule=1f1b parallelism.pipeline=2"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("line", "status"),
    [
        (f"{SCHEDULE} >&-", 0),
        (f"{SCHEDULE} 2>&-", 0),
        (f"{SCHEDULE} <&- >&- 2>&-", 0),
        ("schedule schedule=nothing >&-", 2),
        ("schedule schedule=nothing 2>&-", 2),
        (f"{SCHEDULE} | exec 0<&-", 0),
        (f"{SCHEDULE} schedule.microbatches=400 | head -c 10", 0),
        (f"{SCHEDULE} 2>&1 | exec 0<&-", 0),
        ("schedule schedule=nothing 2>&1 | exec 0<&-", 2),
    ],
)
def test_streams_that_nobody_reads(line: str, status: int, tmp_path: Path) -> None:
    """The work is done, the status is the command's own, and nothing else is printed."""
    script = f"{sys.executable} -m runner {line}; exit ${{PIPESTATUS[0]}}"
    made = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert made.returncode == status
    assert "Traceback" not in made.stderr
    assert "Error" not in made.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    script = f"{sys.executable} -m runner {SCHEDULE} >/dev/full"
    made = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert made.returncode == 1
    (line,) = made.stderr.splitlines()
    assert "No space left on device" in line
