"""Runs the runner's own commands, as somebody would who types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Trained", "run", "train"]


@dataclass(frozen=True)
class Trained:
    """A run that has ended well.

    Args:
        run_dir: its directory.
        record: its record.
        seconds: the time of the whole command.
    """

    run_dir: Path
    record: dict[str, Any]
    seconds: float


def train(run_dir: Path, *words: str) -> Trained:
    """Run ``runner train`` with these overrides; a directory of an earlier run is removed.

    Raises:
        RuntimeError: the command failed; the message is what it said.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    began = time.perf_counter()
    run("train", *words, f"run_dir={run_dir}")
    seconds = time.perf_counter() - began
    return Trained(run_dir, json.loads((run_dir / "record.json").read_text(encoding="utf-8")), seconds)


def run(*words: str | Path) -> str:
    """Run ``runner`` with these words.

    Returns:
        what it printed on standard output.

    Raises:
        RuntimeError: the command failed; the message is what it said.
    """
    command: Sequence[str] = [sys.executable, "-m", "runner", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
