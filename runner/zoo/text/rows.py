"""Rows of a text data set: packed sequences that know nothing of each other, or one padded sequence."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

__all__ = ["IGNORED", "Rows", "TokenFile", "collate", "pack"]

IGNORED = -100
"""The target of a position that no loss counts, as in torch and transformers."""


class TokenFile:
    """Sequences of token ids in files that are mapped into memory; a copy in another process maps them again.

    Args:
        folder: holds ``ids.npy`` and ``counted.npy``, all sequences after each other, ``ends.npy``, where each ends,
            and ``documents.npy``, the number of the document of each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ids, self._counted = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "counted"))
        self._ends = np.concatenate([[0], np.load(folder / "ends.npy")])
        self.documents = np.load(folder / "documents.npy")

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path]]:
        return type(self), (self.folder,)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def positions(self) -> Any:
        """The positions of each sequence: its tokens but the last one, which is a target alone."""
        return np.diff(self._ends) - 1

    def sequence(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one sequence, int64 [positions]."""
        part = slice(self._ends[number], self._ends[number + 1])
        ids = torch.from_numpy(self._ids[part].astype(np.int64))
        counted = torch.from_numpy(self._counted[part].astype(np.bool_))
        return ids[:-1], torch.where(counted[1:], ids[1:], IGNORED)


class Rows(Dataset[Any]):
    """The rows of a data set.

    Args:
        tokens: the sequences.
        members: the numbers of each row's sequences.
        length: positions of each row, if rows are packed; None: a row is a sequence, as long as that is.
    """

    def __init__(self, tokens: TokenFile, members: Sequence[Sequence[int]], length: int | None) -> None:
        self._tokens, self._members, self._length = tokens, members, length

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, number: int) -> tuple[Any, Tensor]:
        """``(input, target)`` int64; a packed input is a dict of ``input_ids`` and ``position_ids``."""
        if self._length is None:
            return self._tokens.sequence(self._members[number][0])
        parts = [self._tokens.sequence(each) for each in self._members[number]]
        ids, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        rest = self._length - len(ids)
        positions = torch.cat([torch.arange(n) for n in [*(len(part[0]) for part in parts), rest]])
        inputs = {"input_ids": functional.pad(ids, (0, rest)), "position_ids": positions}
        return inputs, functional.pad(targets, (0, rest), value=IGNORED)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put sequences into rows: each in turn goes into the fullest row that still has room (best fit).

    Args:
        lengths: at most ``capacity`` each.

    Returns:
        the numbers of each row's sequences.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, row), by room, of the rows that are not full
    for number, length in enumerate(lengths):
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            rows.append([])
            room, row = capacity, len(rows) - 1
        else:
            room, row = rooms.pop(place)
        rows[row].append(number)
        if room > length:
            insort(rooms, (room - length, row))
    return rows


def collate(samples: Sequence[tuple[Any, Tensor]]) -> tuple[Any, Tensor]:
    """The batch ``(input, target)`` of some rows; those that are not packed are padded to the longest of them.

    Padding follows a sequence, and its targets do not count, so that a causal model needs no mask for it.
    """
    inputs, targets = zip(*samples, strict=True)
    if isinstance(inputs[0], dict):
        return {name: torch.stack([each[name] for each in inputs]) for name in inputs[0]}, torch.stack(targets)
    return _padded(inputs, 0), _padded(targets, IGNORED)


def _padded(tensors: Sequence[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=value)
