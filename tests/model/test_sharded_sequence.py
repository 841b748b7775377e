"""Where ranks divide values between divided layers by tokens, they give what the undivided module gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_shards import compared
from shard_ranks import RankExchange, run_sharded
from torch import Tensor, nn
from torch.nn import functional

from runner.model.layers import layers_of
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.plan import Division
from runner.model.sharded.sequence_layers import sequenced_layers
from runner.model.sharded.tokens import TokensError

WIDTH, TOKENS, SAMPLES = 8, 6, 3
EQUAL = 1e-12


class Feed(nn.Module):
    """A feed-forward layer that ranks divide, whose code goes through tokens in one of several ways."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.way = way
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) if way == "places" else torch.randn(WIDTH))

    def forward(self, value: Tensor) -> Any:
        flat = self.way == "flat"
        given = value.reshape(-1, WIDTH) if flat else value
        made = self.down(torch.tanh(self.up(self.norm(given))))
        if flat:
            return (given + made).view(value.shape)
        if self.way == "inplace":
            value = value + 1
            value += made
            return value * self.places
        if self.way == "sizes":
            return value + made.reshape(value.shape[0], value.shape[1], 2, -1).flatten(2) / value.shape[1]
        if self.way == "means":
            return value + made - made.mean(1, keepdim=True)
        if self.way == "joined":
            return value + torch.cat([made, value], 1)[:, 2 : 2 + TOKENS]
        if self.way == "product":
            return value + made @ self.norm.weight.diag()
        return value + made * (1 if self.way == "plain" else self.places)


def build(*ways: str) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*map(Feed, ways)).double()


def batch() -> Tensor:
    return torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)


WHOLE_AGAIN = ("means", "product", "joined")


@pytest.mark.costly
@pytest.mark.parametrize("way", ["plain", "places", "flat", "inplace", "sizes", "means", "product", "joined"])
def test_whatever_lies_between_divided_layers(way: str) -> None:
    """Two layers of it between two plain ones: what is summed for a rank's own tokens, and put together again."""
    model = build("plain", way, way, "plain")
    for cut in (False, True):
        result = compared(model, batch(), 2, tokens=True, cut=cut)
        assert result.error < EQUAL
        calls = Counter(result.forward)
        assert calls["reduce_scatter"] == 4
        assert calls["all_gather"] == 4 if way not in WHOLE_AGAIN else calls["all_gather"] > 4
        assert "all_reduce" not in calls


@pytest.mark.costly
def test_four_ranks_divide_tokens_if_their_number_allows() -> None:
    model = build("plain", "flat")
    assert compared(model, torch.randn(2, 8, WIDTH, dtype=torch.float64), 4, tokens=True).error < EQUAL
    with pytest.raises(TokensError, match="6 tokens cannot be divided among 4 ranks"):
        compared(model, batch(), 4, tokens=True)


def test_a_value_that_is_needed_whole_and_changed_in_place_is_told() -> None:
    class Writing(Feed):
        def forward(self, value: Tensor) -> Any:
            made = self.down(torch.tanh(self.up(self.norm(value))))
            made[:, 0] = 0.0
            return value + made

    with pytest.raises(TokensError, match="changed in place"):
        compared(nn.Sequential(Writing(), Feed()).double(), batch(), 2, tokens=True)


class Ruled(Feed):
    """The same with rules of its own; its weights are made when it is built."""

    def tensor_plan(self) -> dict[str, str]:
        return {"up": "column", "down": "row"}


class Untraceable(Ruled):
    def forward(self, value: Tensor) -> Any:
        made: Tensor = super().forward(value)
        return made if float(made.detach().sum()) > 1e9 else made * 2


class Last(nn.Module):
    """Reads all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, value: Tensor) -> Any:
        return self.out(value.mean(1))


class Listed(nn.Module):
    def __init__(self, *made: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.made = made

    def layers(self) -> list[Any]:
        return list(self.made)


@pytest.mark.costly
def test_layers_that_are_built_later_hand_their_tokens_on() -> None:
    """Also to one that cannot be traced, and to one that reads all tokens, which get all of them."""
    listed, value = Listed(Ruled, Ruled, Untraceable, Ruled, Last), batch()

    def rank(group: ShardGroup, exchange: RankExchange) -> tuple[Tensor, Tensor | None, list[str], list[str]]:
        group.exchange = ShardGroup(2, group.index).exchange  # the ranks meet when all layers are made
        division = Division(group, sequence=True)
        sources = division.of_later(layers_of(listed, 7))
        layers = sequenced_layers(sources, value, torch.float64, "model", division)
        modules = [layer.build() for layer in layers]
        group.exchange = exchange
        return (
            *_run([layer.calling(module) for layer, module in zip(layers, modules, strict=True)], value),
            (exchange.calls),
            division.together,
        )

    wanted, gradient = _run([layer.build().double() for layer in layers_of(listed, 7)], value)
    for output, given, calls, together in run_sharded(2, rank):
        torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(given, gradient, rtol=1e-12, atol=1e-12)
        assert calls[:6] == [
            "reduce_scatter",
            "all_gather",
            "reduce_scatter",
            "all_gather",
            "all_reduce",
            "reduce_scatter",
        ]
        assert [each.split(" has all of them")[0] for each in together] == ["layer 2 (Untraceable)", "the model"]


def _run(functions: list[Callable[[Any], Any]], value: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output, and the gradient of the input."""
    given = value.clone().requires_grad_()
    made: Any = given
    for function in functions:
        made = function(made)
    torch.autograd.backward(functional.mse_loss(made, torch.ones_like(made)))
    return made.detach(), given.grad
