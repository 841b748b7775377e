"""A model that fails once, in its fifth step: it raises, its loss is NaN, or a callback of the user raises."""

from __future__ import annotations

import math
from pathlib import Path

import resume_zoo
from torch import Tensor, nn

from runner.record import read_steps


class FailsOnce(nn.Module):
    """Passes on what it gets, but for one forward after four steps."""

    def __init__(self, run: Path, how: str) -> None:
        super().__init__()
        self._run, self._how = run, how
        self.failed = run / "failed"

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta" or self.failed.exists() or len(read_steps(self._run)) < 4:
            return x
        if self._how == "raise":
            self.failed.write_text("once")
            raise ValueError("no such word in the vocabulary")
        return x * math.nan  # again and again: the step is run a second time to find the layer


def model(run: str, how: str) -> nn.Sequential:
    return nn.Sequential(*resume_zoo.model(), FailsOnce(Path(run), how))
