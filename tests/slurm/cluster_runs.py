"""Runs on the cluster, and the same on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from slurm_cluster import PATIENCE_SECONDS, Cluster

import runner

ROOT = Path(runner.__file__).parent.parent
RUNNER = (sys.executable, "-m", "runner")
STEPS = 40
SKEWED = (
    *("model.target=skewed:model", "data.target=skewed:data", "loss=mse"),
    *("data.batch_size=16", f"trainer.max_steps={STEPS}"),
)
QUIET = ("logger=none", "trainer.progress=false")


def environment(cluster: Cluster) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return {**os.environ, **cluster.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(cluster: Cluster, directory: Path, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """A command in ``directory``, which must end with ``status``."""
    done = subprocess.run(
        words, cwd=directory, env=environment(cluster), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == status, f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def train(cluster: Cluster, directory: Path, *overrides: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    return run(cluster, directory, *RUNNER, "train", *overrides, *QUIET, status=status)


class Followed:
    """A run that was submitted as a job of two nodes, and is followed to its end by the command that submitted it."""

    def __init__(self, cluster: Cluster, run_dir: Path, *overrides: str) -> None:
        self._run_dir = run_dir
        self._file = run_dir.with_suffix(".followed")
        words = (*SKEWED, "launcher=slurm", "launcher.nodes=2", "launcher.wait=true", f"run_dir={run_dir}")
        with self._file.open("wb") as said:
            self._process = subprocess.Popen(
                [*RUNNER, "train", *words, *overrides, *QUIET],
                cwd=run_dir.parent,
                env=environment(cluster),
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        self.job = int(self.said_of("submitted as SLURM job ").split("SLURM job ")[1].split(":")[0])

    def said_of(self, words: str) -> str:
        """What it has said, once ``words`` are in it."""
        end = time.monotonic() + PATIENCE_SECONDS
        while words not in (said := self._file.read_text(errors="replace")):
            assert time.monotonic() < end, f"waited for {words!r}\n{said}\n{log(self._run_dir)}"
            assert self._process.poll() is None, f"waited for {words!r}, but it has ended\n{said}"
            time.sleep(0.05)
        return said

    def finish(self, patience: float = 4 * PATIENCE_SECONDS) -> tuple[int, str]:
        """Its exit status, and what it said."""
        try:
            status = self._process.wait(timeout=patience)
        finally:
            self._process.kill()
        return status, self._file.read_text(errors="replace")


def record(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    return found


def wait_for_step(run_dir: Path, step: int) -> None:
    """Until that many steps are on file."""
    end = time.monotonic() + PATIENCE_SECONDS
    while steps_on_file(run_dir) < step:
        assert time.monotonic() < end, f"{run_dir} has not come to step {step}: {log(run_dir)}"
        time.sleep(0.02)


def steps_on_file(run_dir: Path) -> int:
    lines = run_dir / "steps.jsonl"
    return len(lines.read_text().splitlines()) if lines.exists() else 0


def log(run_dir: Path) -> str:
    file = run_dir / "logs" / "slurm.log"
    return file.read_text(errors="replace") if file.exists() else ""


def assert_equal(run_dir: Path, reference: Path) -> None:
    """Losses and weights, bit for bit."""
    assert record(run_dir)["status"] == "ok", log(run_dir)
    assert record(run_dir)["loss"] == record(reference)["loss"]
    weights, expected = (load_file(each / "weights.safetensors") for each in (run_dir, reference))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
