"""Forwards that take any keywords, return a dataclass or call torch.vmap train in two stages as in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from requests_in_threads import batches, trained
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WIDTH = 6


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        made: Tensor = self.third(torch.tanh(self.between(torch.tanh(self.first(x)))))
        return made

    def between(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(x)
        return made


class Keywords(Plain):
    def forward(self, x: Tensor, **others: Tensor) -> Any:
        return super().forward(x * others["scale"] + others["shift"])


@dataclass
class Inner:
    hidden: Tensor
    factor: float = 0.5


@dataclass
class Output:
    value: Tensor
    inner: list[Inner | None]


class Returned(Plain):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x), [Inner(torch.tanh(self.first(x))), None])


class Mapped(Plain):
    """The cheapest cut would lie between two operators of the function that is mapped over the samples."""

    def between(self, x: Tensor) -> Tensor:
        made: Tensor = torch.vmap(lambda row: self.second(row) * row.sum())(x)
        return made


def build(kind: str) -> nn.Module:
    return {"keywords": Keywords, "dataclass": Returned, "vmap": Mapped}[kind]()


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.rows, self.kind = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)), kind

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return {"x": row, "scale": row.abs(), "shift": row - 1} if self.kind == "keywords" else row, row.tanh()


def loss(output: Any, target: Tensor) -> Tensor:
    if not isinstance(output, Output):
        return mse_loss(output, target)
    inner = output.inner[0]
    assert inner is not None
    return mse_loss(output.value, target) + inner.factor * inner.hidden.square().mean()


@pytest.mark.parametrize("kind", ["keywords", "dataclass", "vmap"])
def test_in_two_stages(kind: str) -> None:
    here = "test_forms_of_forwards"
    words = [f"{key}.target={here}:{name}" for key, name in (("model", "build"), ("data", "Rows"), ("loss", "loss"))]
    words += [f"model.kwargs.kind={kind}", f"data.kwargs.kind={kind}", "data.batch_size=8", "seed=3"]
    losses, state = trained(words, pipeline=2, microbatches=2, steps=3)
    torch.manual_seed(3)
    model, expected = build(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, target in batches(words, 3):
        found = loss(model(**given) if kind == "keywords" else model(given), target)
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(found.item())
    assert losses == pytest.approx(expected, rel=2e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6)
