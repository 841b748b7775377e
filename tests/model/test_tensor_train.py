"""Tables as products of cores: against the definition written out, and as a layer of a model."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runner.config.schema import EmbeddingConfig
from runner.errors import RequestError
from runner.model.embeddings import has_tensor_trains, is_core, make_dense, with_tensor_trains
from runner.model.tensor_train import TensorTrain, TensorTrainEmbedding, column_factors, core_shapes, row_factors


def _by_definition(cores: list[Tensor], rows: int) -> Tensor:
    """Entry by entry: the product of the matrices that a row's and a column's digits choose."""
    high, wide = [core.shape[1] for core in cores], [core.shape[2] for core in cores]
    digits = itertools.product(*map(range, high))
    columns = list(itertools.product(*map(range, wide)))
    table = []
    for row in itertools.islice(digits, rows):
        entries = []
        for column in columns:
            made = torch.eye(1, dtype=cores[0].dtype)
            for core, i, j in zip(cores, row, column, strict=True):
                made = made @ core[:, i, j, :]
            entries.append(made[0, 0])
        table.append(torch.stack(entries))
    return torch.stack(table)


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "count"), [(11, 6, 3, 2), (23, 12, 4, 3), (5, 7, 2, 3), (130, 24, 2, 3)]
)
def test_rows_products_and_gradients_are_those_of_the_definition(
    rows: int, columns: int, rank: int, count: int
) -> None:
    train = TensorTrain(rows, columns, rank=rank, count=count, like=torch.empty((), dtype=torch.float64))
    table = _by_definition(list(train.cores), rows)
    assert torch.allclose(train.table(), table, atol=1e-12)
    numbers = torch.randint(rows, (3, 4))
    value = torch.randn(2, 5, columns, dtype=torch.float64)
    for found, expected in ((train.of_rows(numbers), table[numbers]), (train.times(value), value @ table.T)):
        assert torch.allclose(found, expected, atol=1e-12)
        weights = torch.randn_like(found)
        own, theirs = (
            torch.autograd.grad((each * weights).sum(), list(train.cores), retain_graph=True)
            for each in (found, expected)
        )
        for one, other in zip(own, theirs, strict=True):
            assert torch.allclose(one, other, atol=1e-11)


@pytest.mark.parametrize(("rows", "columns", "count"), [(50, 12, 3), (17, 8, 2), (7, 5, 3)])
def test_full_rank_reconstructs_a_table(rows: int, columns: int, count: int) -> None:
    table = torch.randn(rows, columns, dtype=torch.float64)
    found = TensorTrain.of_table(table, rank=rows * columns, count=count)
    assert torch.allclose(found.table(), table, atol=1e-12)


def test_a_table_of_low_rank_needs_no_more() -> None:
    """The nearest train of the rank that a table has is the table."""
    made = TensorTrain(60, 24, rank=3, count=3, like=torch.empty((), dtype=torch.float64))
    table = made.table().detach()
    padded = torch.zeros(math.prod(row_factors(60, 3)), 24, dtype=torch.float64)
    padded[:60] = table
    whole = TensorTrain.of_table(_by_definition([core.detach() for core in made.cores], len(padded)), rank=3, count=3)
    assert torch.allclose(whole.table()[:60], table, atol=1e-10)


def test_factors() -> None:
    assert row_factors(512, 3) == (8, 8, 8)
    assert column_factors(128, 3) == (4, 4, 8)
    for rows in range(1, 200):
        assert math.prod(row_factors(rows, 3)) >= rows
        assert math.prod(column_factors(rows, 3)) == rows
    assert core_shapes(512, 128, rank=16, count=3) == [(1, 8, 4, 16), (16, 8, 4, 16), (16, 8, 8, 1)]


def test_the_start_has_the_spread_of_the_models_own_table() -> None:
    torch.manual_seed(0)
    for rank in (1, 4, 16):
        entries = torch.stack([TensorTrain(500, 64, rank=rank, count=3, spread=0.02).table() for _ in range(20)])
        assert float(entries.detach().std()) == pytest.approx(0.02, rel=0.25)


class _Model(nn.Module):
    """A table that the input and the output share, and one that stays small."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(300, 32, padding_idx=0)
        self.places = nn.Embedding(4, 32)
        self.head = nn.Linear(32, 300)
        self.head.weight = self.tokens.weight
        self.drop = nn.Dropout(0.0)

    def forward(self, numbers: Tensor) -> Tensor:
        hidden = self.tokens(numbers) + self.places.weight[: numbers.shape[1]]
        return self.head(hidden)  # type: ignore[no-any-return]


def _config(targets: list[str], rank: int = 4) -> EmbeddingConfig:
    return EmbeddingConfig("tensor_train", rank=rank, factors=3, targets=targets)


def test_a_shared_table_becomes_one_train_and_a_table_again() -> None:
    model = with_tensor_trains(_Model(), _config(["tokens", "head"]))
    cores = {name for name, _ in model.named_parameters() if is_core(name)}
    assert cores == {f"tokens.train_of_cores.cores.{at}" for at in range(3)}
    assert type(model.places) is nn.Embedding
    assert isinstance(model.tokens, TensorTrainEmbedding)
    assert not model.tokens(torch.tensor([[0]])).any()
    numbers = torch.randint(1, 300, (2, 4))
    before = model(numbers)
    make_dense(model)
    assert not has_tensor_trains(model)
    assert isinstance(model.get_submodule("tokens"), nn.Embedding)
    assert torch.allclose(model(numbers), before, rtol=1e-4, atol=1e-4)


def test_without_names_embeddings_that_shrink_are_taken() -> None:
    model = _Model()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with_tensor_trains(model, _config([], rank=8))
    assert isinstance(model.tokens, TensorTrainEmbedding)
    assert type(model.places) is nn.Embedding
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize(
    ("targets", "rank", "said"),
    [
        (["tokens"], 4, "must name all layers that share a weight"),
        (["places"], 64, "must make trains smaller than their tables"),
        (["drop"], 4, r"must name embeddings and linear layers\. drop is a Dropout"),
    ],
)
def test_what_cannot_be_a_train_is_refused(targets: list[str], rank: int, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        with_tensor_trains(_Model(), _config(targets, rank))


def test_paths_are_not_kept(tmp_path: Path) -> None:
    """A layer's state has its cores and nothing else."""
    model = with_tensor_trains(_Model(), _config(["tokens", "head"]))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = with_tensor_trains(_Model(), _config(["tokens", "head"]))
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    numbers = torch.randint(300, (1, 3))
    assert torch.equal(model(numbers), other(numbers))
