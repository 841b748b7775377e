"""A model that ends its process at chosen places of a run: forwards, validations, saves, writes.

A file names the places, a line each: ``rank phase number``. The rehearsal, of which the machine decides how long it
is, is not counted. The line that is first when the ranks start holds for them;
who gets there takes it away, notes how many steps the record had by then, and kills itself. The other rank may take
some more actions until it misses its peer: the next line is not for it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import rehearsing
import resume_zoo
import torch
from torch import Tensor, nn

from runner.record import read_steps
from runner.strategy.checkpoints_by_name import NamedCheckpointStrategy


class Killer:
    """Counts what happens in this process."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._places = run / "places"
        self._asked = self._left()[:1]
        self._counts: dict[str, int] = {}
        self._engine = rehearsing.Watch()

    def _left(self) -> list[str]:
        return self._places.read_text().splitlines() if self._places.exists() else []

    def reached(self, phase: str) -> None:
        if self._engine.rehearses:
            return
        self._counts[phase] = self._counts.get(phase, 0) + 1
        lines = self._left()
        if not lines or lines[:1] != self._asked or "RANK" not in os.environ:
            return
        rank, asked, number = lines[0].split()
        if (rank, asked) == (os.environ["RANK"], phase) and self._counts[phase] >= int(number):
            with (self._run / "killed").open("a") as log:
                log.write(f"{lines[0]} {len(read_steps(self._run))}\n")
            self._places.write_text("\n".join(lines[1:]))
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Every part of a checkpoint that is taken, and every file just before it gets its name."""
        take, replace = NamedCheckpointStrategy.saved_parts, os.replace

        def saved_parts(strategy: Any, own: Any) -> Any:
            self.reached("save")
            return take(strategy, own)

        def renamed(source: Any, target: Any) -> None:
            if "checkpoints" in str(target):
                self.reached("write")
            replace(source, target)

        NamedCheckpointStrategy.saved_parts = saved_parts  # type: ignore[assignment]
        os.replace = renamed  # type: ignore[assignment]


class Passes(nn.Module):
    """Passes on what it gets."""

    def __init__(self, killer: Killer) -> None:
        super().__init__()
        self._killer = killer

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            self._killer.reached("step" if self.training and torch.is_grad_enabled() else "validation")
        return x


def model(run: str) -> nn.Sequential:
    killer = Killer(Path(run))
    if "RANK" in os.environ:
        killer.watch()
    return nn.Sequential(Passes(killer), *resume_zoo.model(), Passes(killer))
