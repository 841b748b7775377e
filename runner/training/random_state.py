"""The state of a process's random generators as plain values, which a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, and of this process's CUDA device if it is in use."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = numpy_state
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(name), torch.tensor(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what :func:`random_state` returned."""
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())
