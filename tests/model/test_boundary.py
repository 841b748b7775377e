"""What passes between layers survives the trip, whatever its structure."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from narrow import gradient
from torch import nn

from runner.engine.window import BoundarySpec
from runner.model.boundary import enter_graph, flatten, map_tensors, num_samples, shapes, unflatten

tensors = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
plain = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=3))
values = st.recursive(
    tensors | plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        same(list(one.values()), list(other.values()))
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


@given(values)
@settings(max_examples=150, deadline=None)
def test_the_way_to_another_process_and_back(value: Any) -> None:
    found, structure = flatten(value)
    same(unflatten(found, json.loads(json.dumps(structure))), value)
    spec = BoundarySpec.from_bytes(BoundarySpec.of(*flatten(value)).to_bytes())
    assert spec == BoundarySpec.of(*flatten(value))
    buffers = spec.allocate(torch.device("cpu"))
    for buffer, tensor in zip(buffers, found, strict=True):
        buffer.copy_(tensor)
    same(spec.rebuild(buffers), value)
    same(map_tensors(torch.clone, value), value)


@pytest.mark.parametrize("value", [object(), {(1,): torch.zeros(1)}, [torch.zeros(1), {2}]])
def test_what_cannot_pass(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot pass between layers"):
        flatten(value)


def test_sizes_and_shapes() -> None:
    assert num_samples({"a": torch.zeros(3, 2), "b": torch.zeros(5)}) == 3
    assert shapes((torch.zeros(3, 2), [torch.zeros(1, dtype=torch.int64)])) == "(3, 2) float32, (1,) int64"
    assert shapes(({"logits": torch.zeros(2), "past": None}, torch.zeros(1))) == "{logits: (2,) float32}, (1,) float32"
    assert shapes(None) == "NoneType"
    assert shapes(object()) == "object"


def test_layers_may_work_in_place_on_what_enters_them() -> None:
    """As inside an uncut model, where no tensor between layers is a leaf."""
    leaf = torch.randn(4, 3).requires_grad_()
    before = leaf.detach().clone()
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    module(enter_graph((leaf, 1))[0]).sum().backward()
    whole = before.clone().requires_grad_()
    module(whole * 1).sum().backward()
    assert torch.equal(gradient(leaf), gradient(whole))
    number = torch.arange(3)
    assert enter_graph(number) is number
