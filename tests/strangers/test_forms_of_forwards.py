"""Forwards that take any keywords, return a dataclass or call torch.vmap train in two stages as in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from requests_in_threads import batches, in_plain_pytorch, trained
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from runner.config.compose.resolve import resolve
from runner.errors import RunFailedError
from runner.model.load import load_model

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


class Centred(Plain):
    """What it follows is changed before its first layer, and is read by the layers that follow."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.mean += 0.1 * (x.mean(0) - self.mean)
        return super().forward(x * self.mean)


def build(kind: str) -> nn.Module:
    return {"keywords": Keywords, "dataclass": Returned, "vmap": Mapped, "buffer": Centred}[kind]()


def running() -> nn.Sequential:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("mean", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            made, mean = super().forward(x), self.get_buffer("mean")
            with torch.no_grad():
                mean.lerp_(made.mean(0), 0.1)
            return made * mean

    return nn.Sequential(Scaled(), Scaled())


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


@pytest.mark.parametrize("kind", ["keywords", "dataclass", "vmap", "buffer"])
def test_in_two_stages(kind: str) -> None:
    here = "test_forms_of_forwards"
    words = [f"{key}.target={here}:{name}" for key, name in (("model", "build"), ("data", "Rows"), ("loss", "loss"))]
    words += [f"model.kwargs.kind={kind}", f"data.kwargs.kind={kind}", "data.batch_size=8", "seed=3"]
    assert len(load_model(resolve([*words, "parallelism.pipeline=2", "device=cpu"])).layers) >= 2
    losses, state = trained(words, pipeline=2, microbatches=1 if kind == "buffer" else 2, steps=3)
    torch.manual_seed(3)
    model = build(kind)
    assert losses == pytest.approx(in_plain_pytorch(model, loss, batches(words, 3)), rel=2e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6)


def test_a_buffer_that_a_later_micro_batch_changes_is_told() -> None:
    here = "test_forms_of_forwards"
    words = [f"model.target={here}:running", f"data.target={here}:Rows", "data.kwargs.kind=''", "data.batch_size=8"]
    with pytest.raises(RunFailedError, match=r"read it as buffer\.clone\(\), and schedule\.microbatches=1"):
        trained([*words, f"loss.target={here}:loss"], pipeline=2, microbatches=2, steps=1)
