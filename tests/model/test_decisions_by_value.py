"""A model that decides by the values of tensors is refused in one line with the line of its code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.errors import RequestError
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
