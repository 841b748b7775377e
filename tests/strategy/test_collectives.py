"""What ranks send each other outside steps: plain values and tensors, and no code."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import runner
from runner.engine.measure.timeline import Event, StepTimes
from runner.engine.transport.objects import packed, unpacked
from runner.schedule.values import Op
from runner.training.measure.measures import RankMeasures
from runner.training.random_state import random_state


def test_a_part_of_a_large_tensor_is_sent_without_the_rest() -> None:
    """Weights and their states are parts of flat buffers: each would carry the whole buffer along."""
    flat = torch.arange(100_000.0)
    state = {"weights": [flat[:10], flat[10:30].view(4, 5)], "step": (torch.tensor(3.0), 7), "whole": flat}
    sent = packed(state)
    got = unpacked(sent)
    assert sent.numel() < flat.nbytes + 10_000
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got["weights"], state["weights"], strict=True))
    assert got["step"] == (torch.tensor(3.0), 7)
    assert torch.equal(got["whole"], flat)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        [0.1, -0.0, math.inf, 1 / 3, 2**80, "é\n"],
        {0: {"a": (1, [2, (3,)])}, "b": {}, 7: ()},
        [[], (), {}, "", 0],
    ],
)
def test_plain_values_are_the_same_afterwards(value: object) -> None:
    assert repr(unpacked(packed(value))) == repr(value)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)])
def test_a_tensor_lies_in_memory_as_before(order: tuple[int, ...]) -> None:
    """A product of matrices is rounded by it: a resumed run's must be the unbroken run's."""
    stored = torch.randn(2, 3, 4).permute(order)
    got = unpacked(packed([stored]))[0]
    assert torch.equal(got, stored)
    assert got.stride() == stored.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(3).to(torch.float8_e4m3fn),
        torch.randn(3, dtype=torch.complex64),
        torch.nn.Parameter(torch.randn(2)),
    ],
)
def test_a_tensor_has_its_bits_type_and_shape(tensor: torch.Tensor) -> None:
    got = unpacked(packed(["x", tensor]))[1]
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert got.contiguous().view(-1).view(torch.uint8).tolist() == [
        *tensor.detach().contiguous().view(-1).view(torch.uint8)
    ]


def test_the_state_of_the_random_generators_can_be_sent() -> None:
    state = random_state()
    got = unpacked(packed(state))
    assert got["python"] == state["python"]
    assert torch.equal(got["torch"], state["torch"])


def test_what_a_rank_measured_can_be_sent() -> None:
    events = {3: [Event(Op.F, 0, 1, 0.25, 0.5)]}
    measures = RankMeasures((StepTimes(1, 0.1, 0.2),), events, 1, 2**40, {"a": 1.5}, {"b": 3})
    assert RankMeasures.of_plain(unpacked(packed(measures.to_plain()))) == measures


class _Custom:
    """A class of a user's."""


@pytest.mark.parametrize("value", [_Custom(), [print], {"a": b"bytes"}])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="between ranks"):
        packed(value)


@pytest.mark.costly
def test_no_message_between_ranks_is_a_pickle() -> None:
    """No code of the runner calls torch's collectives of objects, or pickle but for itself and its child."""
    at_home = {"apart.py", "walk.py"}  # between this process and its fork, and within this process
    called = []
    for path in Path(runner.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", getattr(node, "id", "")) if isinstance(node, ast.Attribute | ast.Name) else ""
            if "_object" in name and name.split("_")[0] in ("all", "broadcast", "gather", "scatter", "send", "recv"):
                called.append((path.name, name))
            pickles = ("pickle.loads", "pickle.load", "pickle.dumps")
            if path.name not in at_home and isinstance(node, ast.Call) and ast.unparse(node.func) in pickles:
                called.append((path.name, ast.unparse(node.func)))
    assert {name for _, name in called} <= {
        "gather_objects",
        "all_gather_objects",
    }  # the strategy's own, without pickle
