"""A model that decides by the values of tensors is refused in one line with the line of its code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from runner.errors import RequestError
from runner.model.by_value import by_value
from runner.model.fake import fake_tensors
from runner.model.traced.operators import trace


class Decides(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        if self.kind == "if" and y.sum() > 0:
            y = -y
        if self.kind == "while":
            while y.norm() > 1:
                y = y / 2
        if self.kind == "item":
            y = y * [1, 2][int(y.mean().item() > 0)]
        made: Tensor = self.last(y)
        return made


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("if", '`if self.kind == "if" and y.sum() > 0:`'),
        ("while", "`while y.norm() > 1:`"),
        ("item", "`y = y * [1, 2][int(y.mean().item() > 0)]`"),
    ],
)
def test_the_line_is_told_and_no_graph(kind: str, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError) as refused:
        trace(Decides(kind), torch.randn(3, 6), "mine:build")
    (problem,) = refused.value.problems
    assert line in problem.why
    assert "(test_decisions_by_value.py:" in problem.why
    assert "\n" not in problem.line()
    assert len(problem.line()) < 400
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_code_without_lines_is_told_in_words_too() -> None:
    given: dict[str, Any] = {}
    exec("def chosen(x):\n    return x[:2] if x.nonzero().shape[0] > 3 else x", given)  # as of a graph  # noqa: S102
    with fake_tensors(ShapeEnv()), pytest.raises(Exception, match="Could not guard") as raised:
        given["chosen"](torch.ones(4))
    # The test's own line is a user's.
    raised.value.__traceback__ = None
    assert by_value(raised.value) == (
        "it asks for values of tensors, or for sizes that follow from them, as of x[mask], before there are any"
    )
    assert by_value(ValueError("another")) is None
