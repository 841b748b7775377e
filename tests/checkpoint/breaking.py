"""A model whose second half ends its process now and then: once for each line of a file, which it takes away."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import resume_zoo
from torch import Tensor, nn


class Breaks(nn.Module):
    """Passes on what it gets; at a training forward whose number is in ``at``, it kills its process."""

    def __init__(self, at: Path) -> None:
        super().__init__()
        self._at = at
        self._forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.device.type != "meta":
            self._forwards += 1
            numbers = self._at.read_text().split() if self._at.exists() else []
            if numbers and self._forwards >= int(numbers[0]) and "RANK" in os.environ:
                self._at.write_text(" ".join(numbers[1:]))
                os.kill(os.getpid(), signal.SIGKILL)
        return x


def model(at: str) -> nn.Sequential:
    layers = list(resume_zoo.model())
    return nn.Sequential(*layers, Breaks(Path(at)))
