"""A model whose output cannot be handed on is refused for that, in a pipeline, where it is traced, and elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.errors import RequestError
from runner.model.boundary import flatten
from runner.model.traced.operators import trace


class Output:
    """An object of which nobody knows the parts."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class GivesAnObject(nn.Module):
    def forward(self, value: Tensor) -> Output:
        return Output(2 * value)


def test_the_output_is_named() -> None:
    with pytest.raises(TypeError, match="an Output cannot pass .*named tuples and dataclasses of them can$"):
        flatten({"a": (Output(torch.zeros(1)),)})


def test_a_model_that_would_fail_without_a_pipeline_too_is_not_called_untraceable() -> None:
    with pytest.raises(RequestError) as refused:
        trace(GivesAnObject(), torch.zeros(4, 2), "mine:model")
    (problem,) = refused.value.problems
    assert problem.rule == "must return tensors, or tuples, lists and dicts of them"
    assert problem.fix == ""
