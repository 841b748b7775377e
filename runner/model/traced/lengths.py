"""Lets a trace follow ``len(x)`` of a tensor in a model's own code, which otherwise fixes the batch's size.

Python makes a plain number of whatever ``__len__`` returns, so that the trace would hold for one size alone.
``x.shape[0]``, which is the same, stays a size that may change.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

__all__ = ["fixes_a_size", "following_lengths"]


def fixes_a_size(error: Exception) -> bool:
    """Whether torch.export has refused a model that takes a dynamic size as a plain number."""
    return "Constraints violated" in str(error)


@contextmanager
def following_lengths() -> Iterator[None]:
    """``len`` of a tensor gives what ``shape[0]`` gives; torch's own code keeps plain numbers."""
    own = builtins.len

    def length(of: Sized) -> int:
        if isinstance(of, Tensor) and of.dim():
            asking = str(sys._getframe(1).f_globals.get("__name__", ""))
            if asking.partition(".")[0] != "torch":
                return of.shape[0]
        return own(of)

    with patch.object(builtins, "len", length):
        yield
