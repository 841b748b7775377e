"""Every asynchronous schedule beside 1F1B at equal samples, each as a run of the command ``runner train``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["REQUESTS", "Result", "run"]

STAGES = 4
SAMPLES = 16  # per optimizer step of 1F1B
WHOLE_STEPS = 4  # schedules with a step per micro-batch make so many more steps of fewer samples

_MODEL = (
    "model=gpt", "model.kwargs.vocab_size=32", "model.kwargs.sequence_length=16", "model.kwargs.width=32",
    "model.kwargs.layers=8", "data.kwargs.vocab_size=32", "data.kwargs.sequence_length=16",
    "data.kwargs.samples=4096", "data.kwargs.val_samples=256", "partition=uniform", "device=cpu", "logger=none",
)  # fmt: skip
_MOMENTUM = ("optimizer=sgd", "optimizer.momentum=0.9")


@dataclass(frozen=True)
class Request:
    """One schedule's request.

    Args:
        microbatches: micro-batches per optimizer step.
        parts: how many optimizer steps take the samples of one step of 1F1B.
        more: further overrides.
    """

    microbatches: int
    parts: int = 1
    more: tuple[str, ...] = ()


REQUESTS = {
    "1f1b": Request(4),
    "pipedream": Request(1, WHOLE_STEPS),
    "pipedream_vsync": Request(1, WHOLE_STEPS),
    "pipedream_2bw": Request(4),
    "wpipe": Request(6),
    "ampnet": Request(1, WHOLE_STEPS),
    "spectrain": Request(1, WHOLE_STEPS, _MOMENTUM),
    "xpipe": Request(4),
    "pipemare": Request(1, WHOLE_STEPS),
    "avgpipe": Request(4),
    "hetpipe": Request(1, WHOLE_STEPS),
}
"""The schedules; those whose paper has one micro-batch per step make more and smaller steps."""


@dataclass(frozen=True)
class Result:
    """What one run has recorded.

    Args:
        schedule, optimizer: what was run.
        steps, samples: optimizer steps, and the samples of all of them.
        loss: mean training loss over the last tenth of the steps.
        val_loss: loss over the validation set after the last step.
        versions: the most copies of its weights that a rank holds, in shares of a rank.
    """

    schedule: str
    optimizer: str
    steps: int
    samples: int
    loss: float
    val_loss: float
    versions: float


def run(name: str, steps: int, directory: Path, *, optimizer: tuple[str, ...] = (), rate: float) -> Result:
    """Train with one schedule for as many samples as ``steps`` steps of 1F1B take.

    Args:
        name: one of :data:`REQUESTS`.
        steps: steps of 1F1B.
        directory: a folder for the runs.
        optimizer: overrides for all schedules that do not name their own; AdamW without any.
        rate: the learning rate.
    """
    asked = REQUESTS[name]
    chosen = asked.more or optimizer
    made = steps * asked.parts
    words = [
        *_MODEL, f"schedule={name}", f"parallelism.pipeline={STAGES}", f"schedule.microbatches={asked.microbatches}",
        *chosen, f"optimizer.lr={rate}", f"trainer.max_steps={made}", f"trainer.val_every={made}",
        f"data.batch_size={SAMPLES // asked.parts}", f"run_dir={directory / name}",
    ]  # fmt: skip
    record = _trained(words, directory / name)
    tail = record["loss"][-max(1, made // 10) :]
    return Result(
        schedule=name,
        optimizer=record["config"]["optimizer"]["name"],
        steps=record["steps"],
        samples=record["steps"] * (SAMPLES // asked.parts),
        loss=sum(tail) / len(tail),
        val_loss=record["val_loss"][-1][1],
        versions=max(_drawn(words)["weight_versions"]),
    )


def _trained(words: list[str], directory: Path) -> dict[str, Any]:
    _command("train", *words)
    found: dict[str, Any] = json.loads((directory / "record.json").read_text(encoding="utf-8"))
    return found


def _drawn(words: list[str]) -> dict[str, Any]:
    asked = [word for word in words if word.startswith(("schedule=", "schedule.", "parallelism."))]
    drawn: dict[str, Any] = json.loads(_command("schedule", *asked, "--json"))
    return drawn


def _command(*words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "runner", *words]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout


def rows(results: list[Result]) -> Iterator[list[str]]:
    """The table's rows; the loss of 1F1B is what the others are compared with."""
    base = next(each for each in results if each.schedule == "1f1b")
    for each in results:
        difference = "" if each is base else f"{each.val_loss - base.val_loss:+.3f}"
        figures = [f"{each.loss:.3f}", f"{each.val_loss:.3f}", difference, f"{each.versions:g}"]
        yield [f"`{each.schedule}`", each.optimizer, str(each.steps), *figures]
