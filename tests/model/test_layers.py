"""A user's model as layers: what becomes one, how it is named, seeded and shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_code
from torch import nn

from runner.errors import RequestError
from runner.model.layers import LayerSource, build_stage, layers_of


def run(sources: list[LayerSource], value: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = build_stage(sources, 0, len(sources) - 1)(value)
    return made


def test_a_module_that_stands_twice_in_a_sequential_is_two_layers() -> None:
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act)
    sources = layers_of(model, 0)
    assert [source.name for source in sources] == ["0", "1", "2", "3"]
    given = torch.randn(2, 3)
    assert torch.equal(run(sources, given), model(given))


def test_a_sequential_with_a_forward_of_its_own_is_one_layer() -> None:
    class Residual(nn.Sequential):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = value + super().forward(value)  # type: ignore[no-untyped-call]  # the library's
            return made

    model = Residual(nn.Linear(3, 3), nn.Tanh())
    given = torch.randn(2, 3)
    sources = layers_of(model, 0)
    assert len(sources) == 1
    assert torch.equal(run(sources, given), model(given))
    assert build_stage(sources, 0, 0).global_state().keys() == model.state_dict().keys()


@pytest.mark.parametrize("make", [user_code.model, user_code.Listed, nn.Bilinear(2, 3, 4).__class__])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_names_are_the_users_own(make: Callable[..., Any] | type[Any], cut: int) -> None:
    model = make() if make is not nn.Bilinear else nn.Bilinear(2, 3, 4)
    sources = layers_of(model, 0)
    last = len(sources) - 1
    cuts = [(0, last)] if not 0 < cut <= last else [(0, cut - 1), (cut, last)]
    state: dict[Any, Any] = {}
    for first, end in cuts:
        state |= build_stage(sources, first, end).global_state()
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state, strict=True)


def test_a_layers_weights_do_not_depend_on_who_builds_it() -> None:
    def weights(first: int, last: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(first * 100 + 7)  # another rank has another random state
        return build_stage(layers_of(user_code.Lazy(), 5), first, last).global_state()

    whole = weights(0, 3)
    parts = weights(0, 1) | weights(2, 2) | weights(3, 3)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert not torch.equal(whole["2.weight"][:5, :5], whole["3.weight"][:5, :5])
    other = build_stage(layers_of(user_code.Lazy(), 6), 0, 3).global_state()
    assert not torch.equal(whole["0.weight"], other["0.weight"])


def test_a_rank_builds_its_own_layers_only() -> None:
    built = []

    class Model:
        def layers(self) -> list[Callable[..., Any]]:
            def make(number: int) -> nn.Module:
                built.append(number)
                return nn.Identity()

            return [lambda n=n: make(n) for n in range(5)]

    build_stage(layers_of(Model(), 0), 2, 3)
    assert built == [2, 3]


@pytest.mark.parametrize(
    ("made", "said"), [(3, "It returned a int"), (type("M", (), {"layers": lambda self: []})(), "layers() is empty"),
                       (type("M", (), {"layers": lambda self: [3]})(), "layers()[0] is a int")]
)  # fmt: skip
def test_what_is_no_model(made: object, said: str) -> None:
    with pytest.raises(RequestError, match="model.target") as caught:
        layers_of(made, 0, "m:f")
    assert said in str(caught.value)
