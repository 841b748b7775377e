"""A model that, in the middle of a run, ends its process or removes the folder of a drive."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import rehearsing
import resume_zoo
import torch
from torch import Tensor, nn


class Acts(nn.Module):
    """Passes on what it gets; at one forward of training it acts, and never again. The rehearsal's are not counted.

    Args:
        how: ``kill`` this process, or ``remove`` a folder.
        at: the number of the forward.
        folder: the folder; a process that was killed leaves a mark beside it.
    """

    def __init__(self, how: str, at: int, folder: str) -> None:
        super().__init__()
        self._how, self._left, self._folder = how, at, Path(folder)
        self._mark = Path(f"{folder}-was-killed")
        self._engine = rehearsing.Watch()

    def forward(self, x: Tensor) -> Tensor:
        trains = self.training and torch.is_grad_enabled() and x.device.type != "meta" and "RANK" in os.environ
        if trains and not self._engine.rehearses:
            self._left -= 1
            if self._left == 0 and not self._mark.exists():
                self._act()
        return x

    def _act(self) -> None:
        if self._how == "remove":
            shutil.rmtree(self._folder, ignore_errors=True)  # another rank may, too
            return
        self._mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def model(width: int, how: str = "", at: int = 0, folder: str = "") -> nn.Sequential:
    return nn.Sequential(Acts(how, at, folder), *resume_zoo.model(width))
