"""The dense tensors of which a sparse one consists, because only these have memory that can be counted and compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["SPARSE_LAYOUTS", "dense_parts", "num_bytes_of"]

_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
SPARSE_LAYOUTS = (torch.sparse_coo, *_BY_ROW, *_BY_COLUMN)


def dense_parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Dense tensors as they are; for each sparse one, its places and its values, which share memory with it."""
    for tensor in tensors:
        held = tensor.detach() if tensor.layout in SPARSE_LAYOUTS else tensor
        if held.layout is torch.sparse_coo:
            yield from (held._indices(), held._values())
        elif held.layout in _BY_ROW:
            yield from (held.crow_indices(), held.col_indices(), held.values())
        elif held.layout in _BY_COLUMN:
            yield from (held.ccol_indices(), held.row_indices(), held.values())
        else:
            yield held


def num_bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of tensors: once where several share it or a tensor overlaps itself."""
    memory = (part.untyped_storage() for part in dense_parts(tensors))
    return sum({each._cdata: int(each.nbytes()) for each in memory}.values())
