"""Fake tensors: tensors with shapes and without memory, for a user's model of any size.

A user's code may do with them what crashes the process, so that it meets them only within
:func:`runner.model.apart.apart`.
"""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["begin_autograd", "fake_tensors", "import_fake_tensors"]


def import_fake_tensors() -> None:
    """Import what they need, before processes are forked of which each would do it."""


@cache
def begin_autograd() -> None:
    """Let autograd count the devices before a mode of fake tensors pretends that there are some.

    Where torch is built for CUDA and there is no GPU, such a mode makes eight of them up. A first backward after it
    starts a thread for each, and then no fork of this process can run a backward.
    """
    if not torch.cuda.is_available():  # else the threads are those of GPUs
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def fake_tensors(shapes: Any = None) -> Any:
    """The mode in which every tensor that is made is fake; others may be used beside them.

    Args:
        shapes: torch's ``ShapeEnv``, if sizes may depend on values of tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    begin_autograd()
    # torch would log the traceback of a failure here, but the failure may only be a limit of fake tensors.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    FakeTensor.__deepcopy__ = _copied  # type: ignore[method-assign]
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True)


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A deep copy of a fake tensor. Torch's own reads the memory of a scalar, such as a batch norm's count of batches,
    which is not there.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    made = memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        if name not in vars(made):  # what marks a parameter, and a user's own attributes
            setattr(made, name, copy.deepcopy(value, memo))
    return made
