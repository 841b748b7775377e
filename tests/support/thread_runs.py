"""``runner train`` in this process, a thread for each rank: what the command does between its words and its record."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rank_threads import run_ranks
from safetensors.torch import load_file
from user_project import OVERRIDES, record

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.launch.run.prepare import prepare, write_request
from runner.launch.run.resume import with_checkpoint
from runner.training.run import run_rank

WORDS = tuple(word.replace("mine:", "user_code:") for word in OVERRIDES if not word.startswith("run_dir"))


def result(
    directory: Path, *overrides: str, run: str = "run", words: Sequence[str] = WORDS
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train, which must end well: the record and the weights. A resume names the checkpoint's file."""
    quiet = () if any(word.startswith("logger=") for word in overrides) else ("logger=none",)
    config = resolve([*words, *quiet, "trainer.progress=false", *overrides])
    config.run_dir = str(directory / run)
    config = with_checkpoint(config)
    plan = prepare(config, place_is_made=True)
    (directory / run).mkdir(parents=True, exist_ok=True)
    write_request(config, plan, directory / run, command="runner train")
    with mock.patch("runner.training.run.measured_plan", lambda strategy, *given: strategy.plan):  # no rehearsal
        run_ranks(plan.topology.world_size, lambda rank: run_rank(config, directory / run))
    return record(directory / run), load_file(directory / run / "weights.safetensors")


def told(*words: str) -> tuple[int, str]:
    """A command in this process: its exit status, and all that it has printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(list(words))
    return status, said.getvalue()
