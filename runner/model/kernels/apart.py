"""Runs what builds operators in a thread of its own, which none of the modes reaches under which a layer runs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

import torch

__all__ = ["in_own_thread"]

T = TypeVar("T")


def in_own_thread(function: Callable[[], T]) -> T:
    """What the function returns or raises.

    A profile counts what is allocated, a forward under ``no_grad`` makes no graph, a rematerialized layer has hooks on
    what it saves, and an operator's own code runs below autograd: each of these is the state of a thread.
    """
    made: list[T] = []
    failed: list[BaseException] = []
    random_state = torch.get_rng_state()

    def run() -> None:
        try:
            made.append(function())
        except BaseException as error:  # raised below, in the thread that waits
            failed.append(error)

    thread = Thread(target=run, name="runner-kernels", daemon=True)
    thread.start()
    thread.join()
    if type(random_state) is torch.Tensor:  # a fake tensor, in a profile, has no values
        torch.set_rng_state(random_state)
    if failed:
        raise failed[0]
    return made[0]
