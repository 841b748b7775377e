"""What a save in the background costs the steps beside it, and what the record costs a step.

`runner train` saves every so many steps. Of as many steps the first half has the save, its copy and its writing beside
it, the second half has none: each pair of halves gives a ratio.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from runner.recipes.benchmarks.one_process import gpt_command
from runner.recipes.benchmarks.result import figure, publish
from runner.recipes.benchmarks.rounds import Seconds
from runner.recipes.benchmarks.workload import GptSize
from runner.record import StepLog

__all__ = ["StepTimes", "main", "measure", "record_seconds"]

_TARGET = 1.02
_RECORD_TARGET = 0.01
_STEP_SECONDS = 0.05
_WARM_ROUNDS = 1
"""Rounds before the first that counts: the run's first steps also measure memory."""


class StepTimes(TensorBoardLogger):
    """Lightning's TensorBoard logger, as the runner has by default, which notes when each step ended.

    Args:
        folder: of the TensorBoard files.
        result: the JSON file, with a list of losses and one of times in seconds.
    """

    def __init__(self, folder: str, result: str) -> None:
        super().__init__(folder, name="", version="tensorboard")
        self._result = Path(result)
        self._losses: list[float] = []
        self._ends: list[float] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        if "loss" in metrics:  # after all callbacks of this step, the one that saves included
            self._ends.append(time.perf_counter())
            self._losses.append(float(metrics["loss"]))

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self._result.write_text(json.dumps({"losses": self._losses, "ends": self._ends}), encoding="utf-8")


def measure(size: GptSize, *, samples: int, rounds: int, every: int, asynchronous: bool) -> dict[str, Any]:
    """Run the command; ``seconds`` per step of each half, and ``losses``.

    Args:
        every: steps of a half; a run saves every twice as many.

    Raises:
        CalledProcessError: the command failed.
    """
    steps = 2 * every * (_WARM_ROUNDS + rounds + 1)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *gpt_command(size, samples, steps, folder),
            f"checkpoint.every={2 * every}",
            f"checkpoint.asynchronous={str(asynchronous).lower()}",
            "logger.target=runner.recipes.benchmarks.checkpoints:StepTimes",
            f"+logger.kwargs={{folder:{folder},result:{result}}}",
        ]
        subprocess.run(command, check=True)
        noted = json.loads(result.read_text(encoding="utf-8"))
    ends: list[float] = noted["ends"]
    saves = [2 * every * (_WARM_ROUNDS + number) - 1 for number in range(1, rounds + 1)]  # the steps that save, from 0
    return {
        "losses": noted["losses"],
        "seconds": {
            "with a save": [(ends[at + every - 1] - ends[at - 1]) / every for at in saves],
            "without": [(ends[at + 2 * every - 1] - ends[at + every - 1]) / every for at in saves],
        },
    }


def record_seconds(steps: int) -> list[float]:
    """Seconds of each step's line in the record's log."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder, StepLog(Path(folder)) as log:
        for step in range(steps):
            start = time.perf_counter()
            log.write(step=step + 1, loss=1.0 / (step + 1), seconds=_STEP_SECONDS)
            seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="saves that count")
    parser.add_argument("--steps", type=int, default=10, help="with a save, and as many without")
    parser.add_argument("--samples", type=int, default=8, help="of a step")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/checkpoints.json"))
    options = parser.parse_args()
    size = GptSize()
    seconds: Seconds = {}
    figures, losses = [], {}
    for name, asynchronous in (("in the background", True), ("while the run waits", False)):
        shape = {"samples": options.samples, "rounds": options.rounds, "every": options.steps}
        measured = measure(size, **shape, asynchronous=asynchronous)
        both: Seconds = measured["seconds"]
        seconds |= {f"{name}: {half}": values for half, values in both.items()}
        losses[name] = measured["losses"]
        ratios = [saving / free for saving, free in zip(both["with a save"], both["without"], strict=True)]
        target = _TARGET if asynchronous else None
        figures.append(figure(f"{options.steps} steps with a save {name} / without", ratios, target))
    seconds["a line of the record"] = record_seconds(2000)
    shares = [value / _STEP_SECONDS for value in seconds["a line of the record"]]
    figures.append(figure("a line of the record / a step of 50 ms", shares, _RECORD_TARGET))
    if losses["in the background"] != losses["while the run waits"]:
        sys.exit("the losses differ")
    settings = {"model": size.kwargs(), "samples": options.samples, "steps": options.steps, "threads": 1}
    publish("checkpoints", settings=settings, seconds=seconds, figures=figures, losses=losses, path=options.out)


if __name__ == "__main__":
    main()
