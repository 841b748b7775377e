"""What a layer's run depends on besides its input and its buffers: random numbers, autocast, TorchScript's executor.

TorchScript's executor learns from the first runs and saves other tensors in later ones, so that layers which are run
again are run without its optimizations, the first time, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.jit._fuser import optimized_execution
from torch.utils.checkpoint import get_device_states, set_device_states

from runner.model.boundary import flatten

__all__ = ["Surroundings"]


class Surroundings:
    """Notes how a run begins, so that another one can begin in the same way.

    Args:
        value: the run's input; generators of its devices are noted.
        seeded: whether every run seeds the random generators itself, so that they need not be noted.
    """

    def __init__(self, value: Any, *, seeded: bool) -> None:
        tensors, _ = flatten(value)
        types = sorted({"cpu", *(tensor.device.type for tensor in tensors)} - {"meta"})
        self._autocast = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in types]
        self._caches = torch.is_autocast_cache_enabled()
        self._random = None if seeded else (torch.get_rng_state(), *get_device_states(*tensors))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Begin as then; generators are as they were before when the context ends."""
        with ExitStack() as stack, optimized_execution(False):
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=self._caches))
            if self._random is not None:
                state, devices, states = self._random
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(state)
                set_device_states(devices, states)
            yield
