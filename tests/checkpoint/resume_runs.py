"""Runs for the tests of checkpoints: in this process, or as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from resume_zoo import OVERRIDES
from safetensors.torch import load_file

import runner
from runner.config.compose.resolve import resolve
from runner.launch.run.prepare import prepare, write_request
from runner.launch.run.resume import with_checkpoint

ROOT = Path(runner.__file__).parent.parent


def run_here(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, *overrides: str, base: Sequence[str] = OVERRIDES
) -> dict[str, Any]:
    """A single-rank run in this process; its record. Without ``base`` it is one of the zoo."""
    from runner.training.run import run_rank

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    config = resolve([*base, f"run_dir={run_dir}", *overrides])
    plan = prepare(config)
    config = with_checkpoint(config)
    run_dir.mkdir(exist_ok=True)
    write_request(config, plan, run_dir, command="runner train")
    random_state = torch.get_rng_state()
    run_rank(config, run_dir)
    torch.set_rng_state(random_state)
    return record_of(run_dir)


def command(*words: str) -> tuple[list[str], dict[str, str]]:
    """A command line and its environment."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return [sys.executable, "-m", "runner", *words], {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def train(run_dir: Path, *overrides: str, seconds: float = 280) -> subprocess.CompletedProcess[str]:
    """``runner train`` with the zoo's overrides, in processes of its own."""
    line, environment = command("train", *OVERRIDES, f"run_dir={run_dir}", *overrides)
    return warm.run(line, env=environment, cwd=run_dir.parent, timeout=seconds)


def record_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Equal losses, validations and weights, bit for bit, and as many steps on file.

    A run that ends in between validates there once more; what both have must be equal.
    """
    first, second = record_of(one), record_of(other)
    assert second["status"] == "ok"
    assert second["steps"] == first["steps"] == len(second["loss"])
    assert second["loss"] == first["loss"]
    validated = [step for step, _ in first["val_loss"]]
    assert [pair for pair in second["val_loss"] if pair[0] in validated] == first["val_loss"]
    lines = [json.loads(line) for line in (other / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, first["steps"] + 1))
    assert [line["loss"] for line in lines] == first["loss"]
    expected, found = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
