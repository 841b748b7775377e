"""A model whose checkpoints rank 0 writes to a slow disk: a file takes ten seconds to get its name."""

from __future__ import annotations

import os
import time
from typing import Any

import resume_zoo
from torch import nn


def model(seconds: float) -> nn.Sequential:
    replace = os.replace

    def slowly(source: Any, target: Any) -> None:
        if "checkpoints" in str(target):
            time.sleep(seconds)
        replace(source, target)

    if "RANK" in os.environ:
        os.replace = slowly  # type: ignore[assignment]
    return resume_zoo.model()
