"""8-bit Adam whose blocks follow the parameters, even if a flat tensor holds parts of several.

Moments of 8 bits share a scale among 256 elements. ZeRO gives an optimizer flat partitions, in which blocks would cross
from one parameter to the next and begin at another place in each stage, so every stage would round differently. Here
blocks begin where they begin in the whole parameter, and small parameters keep fp32 moments. So the update of a
partition is that of the whole parameter, except in a block that two ranks may share.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.optim.blocks import BLOCK_8, SMALLEST_8

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels that it can do without

import bitsandbytes.functional  # noqa: E402

__all__ = ["Adam8bit", "Piece"]

_functional: Any = bitsandbytes.functional  # the types of its functions are wrong
_AdamW8bit: Any = bitsandbytes.optim.AdamW8bit  # type: ignore[attr-defined]  # it does not say what it exports


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a parameter in a flat tensor.

    Args:
        start, stop: their range in the flat tensor.
        offset: position of the first one in the parameter.
        elements: number of elements of the whole parameter.
    """

    start: int
    stop: int
    offset: int
    elements: int

    @property
    def is_small(self) -> bool:
        """Whether the parameter keeps fp32 moments."""
        return self.elements < SMALLEST_8

    def aligned(self) -> Iterator[Piece]:
        """Cut the piece so that every part except the last ends where a block of the whole parameter ends."""
        if self.is_small:
            yield self
            return
        first = min(self.stop, self.start + -self.offset % BLOCK_8)
        for start, stop in ((self.start, first), (first, self.stop)):
            if start < stop:
                yield Piece(start, stop, self.offset + start - self.start, self.elements)


class Adam8bit(_AdamW8bit):  # type: ignore[misc]
    """AdamW8bit from bitsandbytes, which can be told of which pieces a flat tensor consists."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._pieces: dict[Tensor, list[Piece]] = {}

    def follow(self, flat: Tensor, pieces: Sequence[Piece]) -> None:
        """Update ``flat`` piece by piece; call this before its first update. Elements in no piece do not change."""
        self._pieces[flat] = [part for piece in pieces for part in piece.aligned()]

    @torch.no_grad()
    def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        """Set the states to zeros; moments and scales of all pieces are concatenated."""
        if p not in self._pieces:
            super().init_state(group, p, gindex, pindex)
            return
        if "dynamic" not in self.name2qmap:
            self.fill_qmap()
        narrow, blocks, wide = (sum(counts) for counts in zip(*map(_counts, self._pieces[p]), strict=True))
        state = self.state[p]
        state["step"] = 0
        for number, table in ((1, "dynamic"), (2, "udynamic")):
            state[f"state{number}"] = torch.zeros(narrow, dtype=torch.uint8, device=p.device)
            state[f"absmax{number}"] = torch.zeros(blocks, device=p.device)
            state[f"small{number}"] = torch.zeros(wide, device=p.device)
            state[f"qmap{number}"] = self.name2qmap[table] = self.name2qmap[table].to(p.device)

    @torch.no_grad()
    def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        if p not in self._pieces:
            super().update_step(group, p, gindex, pindex)
            return
        config, state = self.get_config(gindex, pindex, group), self.state[p]
        state["step"] += 1
        assert p.grad is not None
        gradient, at = p.grad.contiguous(), [0, 0, 0]
        for piece in self._pieces[p]:
            end = [a + b for a, b in zip(at, _counts(piece), strict=True)]
            narrow, blocks, wide = map(slice, at, end)
            own = slice(piece.start, piece.stop)
            if piece.is_small:
                _update_wide(gradient[own], p[own], state["small1"][wide], state["small2"][wide], config, state["step"])
            else:
                moments = [state[name][narrow] for name in ("state1", "state2")]
                scales = [state[name][blocks] for name in ("absmax1", "absmax2")]
                tables = [state[name] for name in ("qmap1", "qmap2")]
                _update_narrow(gradient[own], p[own], moments, scales, tables, config, state["step"])
            at = end


def _counts(piece: Piece) -> tuple[int, int, int]:
    """Numbers of elements with moments of 8 bits, of their blocks, and of elements with fp32 moments."""
    count = piece.stop - piece.start
    return (0, 0, count) if piece.is_small else (count, -(-count // BLOCK_8), 0)


def _update_wide(gradient: Tensor, weight: Tensor, first: Tensor, second: Tensor, config: Any, step: int) -> None:
    _functional.optimizer_update_32bit(
        "adam",
        gradient,
        weight,
        first,
        config["betas"][0],
        config["eps"],
        step,
        config["lr"],
        second,
        config["betas"][1],
        weight_decay=config["weight_decay"],
    )


def _update_narrow(
    gradient: Tensor,
    weight: Tensor,
    moments: Sequence[Tensor],
    scales: Sequence[Tensor],
    tables: Sequence[Tensor],
    config: Any,
    step: int,
) -> None:
    _functional.optimizer_update_8bit_blockwise(
        "adam",
        gradient,
        weight,
        *moments,
        *config["betas"],
        0.0,
        0.0,
        config["eps"],
        step,
        config["lr"],
        *tables,
        *scales,
        config["weight_decay"],
    )
