"""Tables as tensor trains, ``embedding=tensor_train``: a row of the table is a product of one slice of each core.

The table [rows, columns] has rows <= v_1 ... v_K and columns = d_1 ... d_K. Core k is [r_{k-1}, v_k, d_k, r_k], with
r_0 = r_K = 1. A row's number in the mixed radix (v_1, ..., v_K) chooses the slices.

Source: Hrinchuk et al. 2020, "Tensorized Embedding Layers"; Oseledets 2011, "Tensor-Train Decomposition", for
:meth:`TensorTrain.of_table`.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "CORES",
    "TensorTrain",
    "TensorTrainEmbedding",
    "TensorTrainLinear",
    "column_factors",
    "core_shapes",
    "row_factors",
]

CORES = "train_of_cores"
"""What a layer calls its train, so that its cores can be told by their names."""

_WHOLE = 4  # times the product of all cores but the last


def column_factors(columns: int, count: int) -> tuple[int, ...]:
    """``count`` factors of ``columns``, in ascending order, of which the largest is as small as possible."""
    if count == 1:
        return (columns,)
    divisors = [each for each in range(1, columns + 1) if columns % each == 0]
    found = [tuple(sorted((each, *column_factors(columns // each, count - 1)))) for each in divisors]
    return min(found, key=lambda factors: factors[::-1])


def row_factors(rows: int, count: int) -> tuple[int, ...]:
    """``count`` factors, nearly equal and in ascending order, whose product is at least ``rows``."""
    factors: list[int] = []
    for left in range(count, 0, -1):
        factor = next(each for each in range(max(1, math.floor(rows ** (1 / left))), rows + 2) if each**left >= rows)
        factors.append(factor)
        rows = -(-rows // factor)
    return tuple(sorted(factors))


def core_shapes(rows: int, columns: int, *, rank: int, count: int) -> list[tuple[int, int, int, int]]:
    """The shapes of a table's cores; a rank is never larger than what lies on either side of it could use."""
    high, wide = row_factors(rows, count), column_factors(columns, count)
    sizes = [one * other for one, other in zip(high, wide, strict=True)]
    between = [min(rank, math.prod(sizes[:at]), math.prod(sizes[at:])) for at in range(1, count)]
    return list(zip([1, *between], high, wide, [*between, 1], strict=True))


class TensorTrain(nn.Module):
    """A table of so many rows and columns.

    Args:
        rows, columns: the numbers of the table's rows and columns.
        rank: the largest rank between two cores.
        count: the number of cores.
        spread: the standard deviation of the table's entries at the start.
        like: a tensor of the cores' device and format.

    Attributes:
        cores: the trained tensors, each [r_{k-1}, v_k, d_k, r_k].
    """

    def __init__(
        self, rows: int, columns: int, *, rank: int, count: int, spread: float = 1.0, like: Tensor | None = None
    ) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        shapes = core_shapes(rows, columns, rank=rank, count=count)
        between = math.prod(shape[-1] for shape in shapes)
        deviation = (spread**2 / between) ** (1 / (2 * count))
        made = torch.empty(()) if like is None else like
        self.cores = nn.ParameterList(
            torch.randn(shape, device=made.device, dtype=made.dtype) * deviation for shape in shapes
        )

    @classmethod
    @torch.no_grad()
    def of_table(cls, table: Tensor, *, rank: int, count: int) -> TensorTrain:
        """The train that is nearest to a table [rows, columns] core by core; exact if ``rank`` is large enough."""
        rows, columns = table.shape
        made = cls(rows, columns, rank=rank, count=count, like=table)
        sizes = [(core.shape[1], core.shape[2]) for core in made.cores]
        padded = functional.pad(table, (0, 0, 0, math.prod(size[0] for size in sizes) - rows))
        whole = padded.view([size[0] for size in sizes] + [size[1] for size in sizes])
        left = whole.permute(
            [axis for pair in zip(range(count), range(count, 2 * count), strict=True) for axis in pair]
        )
        before, cores = 1, []
        for at, (high, wide) in enumerate(sizes[:-1]):
            matrix = left.reshape(before * high * wide, -1)
            u, s, v = torch.linalg.svd(matrix, full_matrices=False)
            kept = made.cores[at].shape[-1]
            cores.append(_padded(u, 1, kept).view(before, high, wide, kept))
            left, before = _padded(s[:, None] * v, 0, kept), kept
        cores.append(left.reshape(before, *sizes[-1], 1))
        for parameter, core in zip(made.cores, cores, strict=True):
            parameter.copy_(core)
        return made

    def of_rows(self, numbers: Tensor) -> Tensor:
        """The rows [..., columns] of the table with these numbers [...].

        All cores but the last are multiplied first, whole: what a row keeps for the backward is then a slice of their
        product, which is smaller than a slice of an inner core. A table that is hardly larger is made whole.
        """
        prefix, last = self._prefix(), cast(Tensor, self.cores[-1])
        if self.rows * self.columns <= _WHOLE * prefix.numel():
            return functional.embedding(numbers, self._table(prefix))
        flat, (before, high, wide, _) = numbers.reshape(-1), last.shape
        left = functional.embedding(flat // high, prefix.flatten(1)).view(len(flat), -1, before)
        right = functional.embedding(flat % high, last.transpose(0, 1).flatten(1)).view(len(flat), before, wide)
        return torch.bmm(left, right).reshape(*numbers.shape, self.columns)

    def _prefix(self) -> Tensor:
        """The product of all cores but the last, [v_1 ... v_{K-1}, d_1 ... d_{K-1}, r_{K-1}]."""
        first, *others = self.cores[:-1]
        made: Tensor = first.squeeze(0)
        for core in others:
            made = torch.einsum("hwb,bvdc->hvwdc", made, core).flatten(0, 1).flatten(1, 2)
        return made

    def _table(self, prefix: Tensor) -> Tensor:
        whole = torch.einsum("hwb,bvd->hvwd", prefix, cast(Tensor, self.cores[-1]).squeeze(-1))
        return whole.flatten(0, 1).flatten(1)[: self.rows]

    def times(self, value: Tensor) -> Tensor:
        """``value @ table.T``: [..., columns] to [..., rows]."""
        flat = value.reshape(-1, self.columns)
        left = flat.view(len(flat), 1, 1, -1)  # [samples, rows so far, rank, columns that are left]
        for core in self.cores:
            before, high, wide, after = core.shape
            left = left.reshape(*left.shape[:2], before, wide, left.shape[-1] // wide)
            left = torch.einsum("nvbwc,bhwa->nvhac", left, core)
            left = left.reshape(len(flat), -1, after, left.shape[-1])
        return left.reshape(len(flat), -1)[:, : self.rows].reshape(*value.shape[:-1], self.rows)

    def table(self) -> Tensor:
        """The whole table [rows, columns]."""
        return self._table(self._prefix())


class TensorTrainEmbedding(nn.Module):
    """An ``nn.Embedding`` whose table is a train; ``weight`` is the whole table, which is made where it is read."""

    def __init__(self, train: TensorTrain, padding: int | None = None) -> None:
        super().__init__()
        self.train_of_cores, self.padding_idx = train, padding
        self.num_embeddings, self.embedding_dim = train.rows, train.columns

    @property
    def weight(self) -> Tensor:
        """The table [num_embeddings, embedding_dim]."""
        return self._without_padding(self.train_of_cores.table(), torch.arange(self.num_embeddings))

    @torch.no_grad()
    def dense(self) -> nn.Embedding:
        """Torch's layer with the same table."""
        return nn.Embedding(self.num_embeddings, self.embedding_dim, padding_idx=self.padding_idx, _weight=self.weight)

    def forward(self, numbers: Tensor) -> Tensor:
        """[...] numbers of rows to [..., embedding_dim]."""
        return self._without_padding(self.train_of_cores.of_rows(numbers), numbers)

    def _without_padding(self, rows: Tensor, numbers: Tensor) -> Tensor:
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((numbers == self.padding_idx)[..., None].to(rows.device), 0)


class TensorTrainLinear(nn.Module):
    """An ``nn.Linear`` whose weight is a train; ``weight`` is the whole matrix, which is made where it is read."""

    def __init__(self, train: TensorTrain, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.train_of_cores, self.bias = train, bias
        self.in_features, self.out_features = train.columns, train.rows

    @property
    def weight(self) -> Tensor:
        """The matrix [out_features, in_features]."""
        return self.train_of_cores.table()

    @torch.no_grad()
    def dense(self) -> nn.Linear:
        """Torch's layer with the same matrix and bias."""
        weight = self.weight
        made = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, dtype=weight.dtype)
        made.weight.copy_(weight)
        if self.bias is not None:
            made.bias.copy_(self.bias)
        return made

    def forward(self, value: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        made = self.train_of_cores.times(value)
        return made if self.bias is None else made + self.bias


def _padded(matrix: Tensor, axis: int, size: int) -> Tensor:
    """The first ``size`` rows or columns, with zeros where there are fewer."""
    kept = matrix.narrow(axis, 0, min(size, matrix.shape[axis]))
    missing = size - kept.shape[axis]
    return functional.pad(kept, (0, missing) if axis == 1 else (0, 0, 0, missing))
