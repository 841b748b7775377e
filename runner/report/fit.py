"""Fits a table into a terminal's width: shorter names, headers of several lines, and fewer columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.config.short_names import short_names

__all__ = ["Fitted", "fitted"]

_GAP = 2  # characters between two columns
_LONGEST_WORD = 24  # that a column of free text need not break


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a terminal shows of a table.

    Args:
        header: the names of the columns, which may have several lines.
        rows: the cells.
        is_free: for each column whether its text may be broken into lines.
        left_out: the names of the columns for which there is no room.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_free: tuple[bool, ...]
    left_out: tuple[str, ...] = ()


def fitted(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    rigid: Sequence[str],
    spare: Sequence[str],
) -> Fitted:
    """The table for a terminal of ``width`` columns: overrides have short names; all else stays if it has room.

    If not, text is broken at words, then spare columns are left out, until it has room. The names do not depend on the
    room, because a table that changes in place would change them while its columns become wider.

    Args:
        header, rows: the whole table.
        width: characters of a line.
        rigid: columns whose cells are not broken; the text of others is.
        spare: columns that may be left out, the last one first.
    """
    is_free = tuple(name not in rigid for name in header)
    short = [_shortened(row, is_free, names) for row, names in zip(rows, _names(rows, is_free), strict=True)]
    if _needed(header, short, [False] * len(header)) <= width:
        return Fitted(tuple(header), tuple(short), is_free)
    folded = [name if free else name.replace(" ", "\n") for name, free in zip(header, is_free, strict=True)]
    columns, left_out = dict(enumerate(folded)), list[str]()
    for name in reversed(spare):
        if _needed([*columns.values()], _of(short, columns), [is_free[at] for at in columns]) <= width:
            break
        columns.pop(header.index(name))
        left_out.insert(0, name)
    shown = tuple(_of(short, columns))
    return Fitted(tuple(columns.values()), shown, tuple(is_free[at] for at in columns), tuple(left_out))


def _needed(header: Sequence[str], rows: Sequence[Sequence[str]], is_free: Sequence[bool]) -> int:
    """The width of a table whose free columns are as narrow as their longest words."""
    return 1 + sum(
        _GAP + max(_longest(cell, at_words=free) for cell in (name, *(row[at] for row in rows)))
        for at, (name, free) in enumerate(zip(header, is_free, strict=True))
    )


def _longest(cell: str, *, at_words: bool) -> int:
    if at_words:
        return min(_LONGEST_WORD, max(map(len, cell.split()), default=0))
    return max(map(len, cell.split("\n")))


def _of(rows: Sequence[Sequence[str]], columns: dict[int, str]) -> list[tuple[str, ...]]:
    return [tuple(row[at] for at in columns) for row in rows]


def _names(rows: Sequence[Sequence[str]], is_free: Sequence[bool]) -> list[str]:
    """What the free columns of each row say, with short keys."""
    return short_names(
        [[word for cell, free in zip(row, is_free, strict=True) if free for word in cell.split(" ")] for row in rows]
    )


def _shortened(row: Sequence[str], is_free: Sequence[bool], name: str) -> tuple[str, ...]:
    """The row with its only free cell as a short name; several free cells stay as they are."""
    return tuple(name if free and sum(is_free) == 1 else cell for cell, free in zip(row, is_free, strict=True))
