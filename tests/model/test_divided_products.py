"""Linear maps whose features ranks divide, as named in a plan: what the whole maps give, in values and gradients."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib import util

import pytest
import torch
from narrow import gradient
from shard_threads import RankOrder, run_shards
from torch import Tensor, nn

from runner.model.sharded.group import ShardGroup
from runner.model.sharded.wrap import divide

pytorch_utils = pytest.importorskip("transformers.pytorch_utils")


def linear(reads: int, makes: int) -> nn.Module:
    return nn.Linear(reads, makes).double()


def transposed(reads: int, makes: int) -> nn.Module:
    """A map of GPT-2's code, whose weight is [reads, makes], with a bias that is not zero."""
    made: nn.Module = pytorch_utils.Conv1D(makes, reads).double()
    nn.init.normal_(made.get_parameter("bias"))
    return made


@pytest.mark.parametrize("make", [linear, transposed])
@pytest.mark.parametrize("degree", [2, 3])
def test_a_column_and_a_row_give_what_whole_maps_give(make: Callable[[int, int], nn.Module], degree: int) -> None:
    """The bias of a row counts once, however many ranks there are."""
    torch.manual_seed(3)
    whole, value = nn.Sequential(make(4, 6), nn.Tanh(), make(6, 5)), torch.randn(7, 4, dtype=torch.float64)
    copies = [copy.deepcopy(whole) for _ in range(degree)]

    def run(group: ShardGroup, exchange: RankOrder) -> tuple[Tensor, dict[str, Tensor]]:
        model = copies[group.index]
        divide(model[0], "0", "column", group, {})
        divide(model[2], "2", "row", group, {})
        made: Tensor = model(value)
        made.square().sum().backward()  # type: ignore[no-untyped-call]  # the library's
        return made.detach(), {name: gradient(each) for name, each in model.named_parameters()}

    expected = whole(value)
    expected.square().sum().backward()
    gradients = {name: gradient(each) for name, each in whole.named_parameters()}
    of_columns = 1 if make is transposed else 0
    dims = {"0.weight": of_columns, "0.bias": 0, "2.weight": 1 - of_columns, "2.bias": None}
    for index, (made, found) in enumerate(run_shards(degree, run)):
        torch.testing.assert_close(made, expected.detach())
        for name, dim in dims.items():
            one = gradients[name] if dim is None else gradients[name].chunk(degree, dim)[index]
            torch.testing.assert_close(found[name], one)


def test_a_transposed_map_is_known_whenever_transformers_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process that has divided a model before anything imported it."""
    spec = util.find_spec("runner.model.sharded.wrap")
    assert spec is not None
    assert spec.loader is not None
    fresh = util.module_from_spec(spec)  # as in a process that has asked nothing yet
    spec.loader.exec_module(fresh)
    mapped = pytorch_utils.Conv1D(6, 4)
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "transformers.pytorch_utils")
        assert not fresh._is_transposed(nn.Linear(4, 6))
    assert fresh._is_transposed(mapped)
