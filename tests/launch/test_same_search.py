"""A search gives the same answer byte for byte in each process, whatever the hashes of Python and the cores are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_WORDS = ("model=gpt", "hardware=a100_80gb", "parallelism=auto", "parallelism.ranks=4", "parallelism.search=quick")


@pytest.mark.costly
def test_neither_hashes_nor_cores_change_the_answer(tmp_path: Path) -> None:
    """Also with a limit, which makes the search look at recomputation and at what states take."""
    core, root = min(os.sched_getaffinity(0)), Path(__file__).resolve().parents[2]

    def answer(seed: int, *, one_core: bool) -> bytes:
        command = [sys.executable, "-m", "runner", "plan", *_WORDS, "memory_limit=9MB", "--json"]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root)}
        taken = ["taskset", "-c", str(core)] if one_core else []
        return subprocess.run([*taken, *command], env=environment, cwd=tmp_path, capture_output=True, check=True).stdout

    first = answer(1, one_core=False)
    assert first.startswith(b"{")
    assert answer(2, one_core=True) == first
