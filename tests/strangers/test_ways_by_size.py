"""Models whose code asks about the sizes of a batch: the trace takes one way, and says so where another is due."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from requests_in_threads import batches, in_plain_pytorch, trained
from torch import nn
from torch.nn import functional

SAMPLES, BATCH, WIDTH = 24, 8, 8


class Causal(nn.Module):
    """Decides by the number of queries whether it is causal, as attention with a cache does."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.own, self.inner = own, nn.Linear(WIDTH, WIDTH)
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.inner(x)
        if self.own == "keyword":
            q = functional.scaled_dot_product_attention(q, q, q, is_causal=q.shape[1] > 1)
        elif self.own == "positional":
            q = torch.nn.functional.scaled_dot_product_attention(q, q, q, None, 0.0, q.size(-2) != 1)
        else:
            q = torch.argsort(q, 1, bool(q.shape[1] >= 4)).float() * q
        added: torch.Tensor = self.more(q) + x
        return added


class Branching(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        taken = x.shape[1] > 4 if self.kind == "longer" else x.shape[1] % 2 == 0
        made: torch.Tensor = self.second(x * 2) if taken else self.second(x * 3)
        return made


class Lengths(torch.utils.data.Dataset[Any]):
    """The first batches have longer samples than the last ones."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(2)
        self.rows = [torch.randn(length, WIDTH, generator=generator) for length in lengths for _ in range(BATCH)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.rows[index] * 0.5


def causal(own: str) -> nn.Module:
    return Causal(own)


def branching(kind: str) -> nn.Module:
    return Branching(kind)


def lengths(which: str) -> Lengths:
    return Lengths(tuple(map(int, which)))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


def request(model: str, argument: str, which: str) -> list[str]:
    here = "test_ways_by_size"
    return [
        f"model.target={here}:{model}", f"model.kwargs.{argument}", f"data.target={here}:lengths",
        f"data.kwargs.which='{which}'", f"loss.target={here}:loss", f"data.batch_size={BATCH}", "seed=3",
    ]  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("own", ["keyword", "positional", "sorted"])
def test_a_bool_of_a_size_is_decided(own: str) -> None:
    """As one process decides it, in two stages, for other lengths than the traced one, too."""
    torch.manual_seed(3)
    words = request("causal", f"own={own}", "656")
    expected = in_plain_pytorch(causal(own), loss, batches(words, 3))
    losses, _ = trained(words, pipeline=2, microbatches=2, steps=3)
    assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "good", "bad", "told"),
    [("longer", "679", "64", "a size between 5 and inf alone, got 4"), ("even", "648", "67", "x.size()[1] % 2")],
)
def test_another_way_is_refused(kind: str, good: str, bad: str, told: str) -> None:
    """A length for which the code would branch otherwise than in the trace is told, and not computed wrongly."""
    torch.manual_seed(3)
    asked = f"kind={kind}"
    expected = in_plain_pytorch(branching(kind), loss, batches(request("branching", asked, good), len(good)))
    losses, _ = trained(request("branching", asked, good), pipeline=2, microbatches=2, steps=len(good))
    assert losses == pytest.approx(expected, rel=2e-6)
    with pytest.raises(Exception, match=r"the model's code asked about sizes") as raised:
        trained(request("branching", asked, bad), pipeline=2, microbatches=2, steps=len(bad))
    assert told in str(raised.value)
