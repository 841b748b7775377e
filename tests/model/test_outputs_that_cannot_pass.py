"""A model whose output cannot be handed on is refused for that, in a pipeline, where it is traced, and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from runner.errors import RequestError
from runner.model.boundary import flatten
from runner.model.traced.operators import trace


@dataclass
class Output:
    """As the models of transformers return one."""

    logits: Tensor


class GivesAnObject(nn.Module):
    def forward(self, value: Tensor) -> Output:
        return Output(2 * value)


def test_the_output_is_named_with_what_it_should_be() -> None:
    with pytest.raises(TypeError, match="a Output cannot pass .*; a model of transformers must return its logits"):
        flatten(Output(torch.zeros(1)))
    with pytest.raises(TypeError, match=r"float, str\) can$"):
        flatten(object())


def test_a_model_that_would_fail_without_a_pipeline_too_is_not_called_untraceable() -> None:
    with pytest.raises(RequestError) as refused:
        trace(GivesAnObject(), torch.zeros(4, 2), "mine:model")
    (problem,) = refused.value.problems
    assert problem.rule == "must return tensors, or tuples, lists and dicts of them"
    assert problem.fix == ""
