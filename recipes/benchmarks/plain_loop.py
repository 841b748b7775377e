"""The hand-written loop, and a Lightning logger that lets it take turns with `runner train`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from runner.recipes.benchmarks.rounds import Seconds
from runner.recipes.benchmarks.workload import GptSize, cross_entropy, gpt_batches, gpt_layers, make_adamw

__all__ = ["SEED", "WARM_TURNS", "PlainLoop", "PlainLoopLogger"]

SEED = 0
WARM_TURNS = 2
"""Turns before the first that counts: the runner's first steps also measure memory."""


class PlainLoop:
    """The hand-written loop."""

    def __init__(self, size: GptSize, samples: int, steps: int) -> None:
        self.losses: list[float] = []
        self._model = nn.Sequential(*gpt_layers(size, SEED))
        self._optimizer = make_adamw(list(self._model.parameters()))
        self._batches = iter(gpt_batches(size, samples, steps))

    def step(self) -> None:
        """The next batch's optimizer step; keeps its loss."""
        inputs, targets = next(self._batches)
        self._optimizer.zero_grad()
        loss = cross_entropy(self._model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.losses.append(loss.item())


class PlainLoopLogger(TensorBoardLogger):
    """Lightning's TensorBoard logger, as the runner has by default, which runs the plain loop between turns.

    Args:
        folder: of the TensorBoard files.
        result: the JSON file for seconds and losses, by contestant.
        samples: of a step.
        steps: of the run.
        turn: steps of a turn.
        size: the model's arguments.
    """

    def __init__(self, folder: str, result: str, samples: int, steps: int, turn: int, size: dict[str, Any]) -> None:
        super().__init__(folder, name="", version="tensorboard")
        self._result = Path(result)
        self._plain = PlainLoop(GptSize(**size), samples, steps)
        self._turn = turn
        self._runner_losses: list[float] = []
        self._seconds: Seconds = {"runner": [], "plain loop": []}
        self._since = 0.0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        if "loss" not in metrics:
            return
        self._runner_losses.append(float(metrics["loss"]))
        if len(self._runner_losses) % self._turn == 0:
            self._take_turn()

    def _take_turn(self) -> None:
        """The plain loop's turn; the runner's ended just now, logging included."""
        begun = time.perf_counter()
        with torch.enable_grad():
            for _ in range(self._turn):
                self._plain.step()
        ended = time.perf_counter()
        if len(self._runner_losses) > self._turn * WARM_TURNS:
            self._seconds["runner"].append((begun - self._since) / self._turn)
            self._seconds["plain loop"].append((ended - begun) / self._turn)
        self._since = time.perf_counter()

    def finalize(self, status: str) -> None:
        super().finalize(status)
        losses = {"runner": self._runner_losses, "plain loop": self._plain.losses}
        self._result.write_text(json.dumps({"seconds": self._seconds, "losses": losses}), encoding="utf-8")
