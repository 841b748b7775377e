"""Packs small whole numbers into bytes: eight numbers of b bits take b bytes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "packed_bytes", "unpack"]

_BYTE = 8


def packed_bytes(count: int, bits: int) -> int:
    """The number of bytes of ``count`` packed numbers of ``bits`` bits each."""
    return -(-count // _BYTE) * bits


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack whole numbers from 0 to 2**bits - 1; shape [n] becomes uint8 [:func:`packed_bytes`]."""
    missing = -len(numbers) % _BYTE
    groups = torch.nn.functional.pad(numbers.to(_dtype(bits)), (0, missing)).view(-1, _BYTE, 1)
    digits = (groups >> _places(bits, groups)) & 1
    weights = 2 ** torch.arange(_BYTE, dtype=torch.uint8, device=numbers.device)
    return (digits.to(torch.uint8).view(-1, _BYTE) * weights).sum(dim=1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` numbers of :func:`pack`'s result: [count], uint8 up to 8 bits, else int32."""
    places = torch.arange(_BYTE, dtype=torch.uint8, device=packed.device)
    digits = ((packed.unsqueeze(1) >> places) & 1).view(-1, bits).to(_dtype(bits))
    return (digits << _places(bits, digits)).sum(dim=1, dtype=digits.dtype)[:count]


def _dtype(bits: int) -> torch.dtype:
    return torch.uint8 if bits <= _BYTE else torch.int32


def _places(bits: int, like: Tensor) -> Tensor:
    return torch.arange(bits, dtype=like.dtype, device=like.device)
