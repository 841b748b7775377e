"""Fake tensors have the bytes of real ones, in the forward and the backward of every operator of a zoo."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from operators import ZOO, Case
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.model.fake import fake_tensors
from runner.model.live_tracker import LiveTracker
from runner.profiling.real_sizes import RealSizes

ON_REAL_TENSORS = {
    "RNN packed", "GRU packed", "LSTM packed", "adaptive softmax", "ctc", "orthogonal", "gaussian",
}  # fmt: skip
"""What torch cannot run on fake tensors, because sizes depend on values: it is profiled on real ones."""
MORE_THAN_REAL = {
    "segment_reduce": "a constant that a function makes is copied",
    "one_hot": "the largest class is looked up in a copy",
}
"""Where fake tensors have more bytes, and why."""


class Bytes(NamedTuple):
    """Bytes of a forward and a backward: most at once, and those alive after it, saved tensors and outputs included."""

    forward_peak: int
    forward: int
    backward_peak: int
    backward: int


def count(case: Case) -> Bytes:
    torch.manual_seed(0)
    function, inputs = case()
    with LiveTracker() as tracker:
        made: Any = function(*inputs)
        roots = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.requires_grad]
        forward, gradients = (tracker.peak, tracker.live), [torch.ones_like(root) for root in roots]
        tracker.reset_peak()
        before = tracker.live
        torch.autograd.backward(roots, gradients)
        return Bytes(*forward, tracker.peak - before, tracker.live)


def compare(name: str, case: Case) -> str:
    """What is wrong with the bytes of a case on fake tensors; empty if nothing is."""
    real = count(case)
    try:
        with fake_tensors(), RealSizes():
            fake = count(case)
    except Exception as error:  # torch raises several kinds where it must know a value
        return "" if name in ON_REAL_TENSORS else f"{name}: {type(error).__name__}: {error}"
    if name in ON_REAL_TENSORS:
        return f"{name} runs on fake tensors"
    above = all(each >= counted for each, counted in zip(fake, real, strict=True))
    return "" if fake == real or (name in MORE_THAN_REAL and above) else f"{name}: fake {fake}, real {real}"


@pytest.mark.costly
@pytest.mark.parametrize("family", ZOO)
def test_fake_tensors_have_the_bytes_of_real_ones(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that torch calls slow or experimental
        found = [compare(name, case) for name, case in ZOO[family].items()]
    assert [each for each in found if each] == []


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("recurrent", "LSTM 1 {}"),
        ("recurrent", "GRU 1 {}"),
        ("losses", "MSELoss mean"),
        ("losses", "SmoothL1Loss mean"),
        ("losses", "SoftMarginLoss mean"),
        ("losses", "BCELoss"),
        ("convolutions", "col2im"),
        ("embeddings_and_indices", "bags mean"),
        ("pools_and_norms", "GroupNorm channels last"),
        ("pools_and_norms", "BatchNorm2d of a narrow input"),
        ("pools_and_norms", "LayerNorm of a narrow input"),
        ("pools_and_norms", "GroupNorm of a narrow input"),
    ],
)
def test_operators_that_torch_counts_otherwise_are_mended(family: str, name: str) -> None:
    """One case of each operator whose fake outputs the runner gives the bytes of real ones."""
    assert compare(name, ZOO[family][name]) == ""
