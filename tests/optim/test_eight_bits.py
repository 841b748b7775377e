"""8-bit Adam over parts of parameters beside the same over whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from runner.optim.kinds.eight_bits import Adam8bit, Piece

SIZES = (5000, 100, 8192, 300, 4097)  # some small, some that end within a block
SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def rows_of(flat: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    ends = [0, *cuts, flat]
    return list(zip(ends[:-1], ends[1:], strict=True))


def pieces_between(low: int, high: int) -> list[Piece]:
    found, at = [], 0
    for size in SIZES:
        start, stop = max(low, at), min(high, at + size)
        if start < stop:
            found.append(Piece(start - low, stop - low, start - at, size))
        at += size
    return found


def trained(cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The whole parameters after ten steps, and the same cut into partitions."""
    generator = torch.Generator().manual_seed(0)
    whole = [Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    row = torch.cat([one.detach() for one in whole])
    rows = rows_of(len(row), cuts)
    flats = [Parameter(row[low:high].clone()) for low, high in rows]
    ours = [Adam8bit([flat], **SETTINGS) for flat in flats]
    for optimizer, flat, (low, high) in zip(ours, flats, rows, strict=True):
        optimizer.follow(flat, pieces_between(low, high))
    plain = Adam8bit(whole, **SETTINGS)
    for step in range(10):
        gradients = [torch.randn(size, generator=generator) * (step + 1) for size in SIZES]
        for parameter, gradient in zip(whole, gradients, strict=True):
            parameter.grad = gradient
        for flat, (low, high) in zip(flats, rows, strict=True):
            flat.grad = torch.cat(gradients)[low:high].clone()
        for optimizer in (plain, *ours):
            optimizer.step()
    return torch.cat([one.detach() for one in whole]), torch.cat([flat.detach() for flat in flats])


@pytest.mark.parametrize("cuts", [(), (5050,), (5100 + 256, 5100 + 4096)], ids=["one", "in_a_small_one", "at_blocks"])
def test_parts_that_cut_no_block_are_updated_bit_by_bit(cuts: tuple[int, ...]) -> None:
    whole, parts = trained(cuts)
    assert torch.equal(whole, parts)


def test_a_block_that_is_cut_is_the_only_one_that_differs() -> None:
    whole, parts = trained((9001,))
    (apart,) = torch.nonzero(whole != parts, as_tuple=True)
    first = 5100 + (9001 - 5100) // 256 * 256
    assert 0 < len(apart) <= 256
    assert first <= int(apart.min())
    assert int(apart.max()) < first + 256
    assert float((whole - parts).abs().max()) < 10 * SETTINGS["lr"]


def test_padding_stays() -> None:
    flat = Parameter(torch.ones(6000))
    optimizer = Adam8bit([flat], **SETTINGS)
    optimizer.follow(flat, [Piece(0, 5900, 0, 5900)])
    flat.grad = torch.ones(6000)
    optimizer.step()
    apart = (flat.detach() - 1).abs()
    assert float(apart[5900:].max()) == 0
    assert float(apart[:5900].min()) > 0
