"""What a terminal shows after bytes were written to it: lines, of which the upper ones have scrolled out of reach."""

from __future__ import annotations

import io
import re

_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    """A file that is a terminal of ``height`` lines, as long as no line is wider than it."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.height = height

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Everything that stands there, also what has scrolled away, without what was erased."""
        lines, row, column = [""], 0, 0
        for match in _SEQUENCE.finditer(self.getvalue()):
            numbers, letter, control, text = match.groups()
            if control == "\r":
                column = 0
            elif control == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif text is not None:
                assert len(text) + column <= 200
                lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]
                column += len(text)
            elif letter == "A":
                row = max(row - int(numbers or 1), len(lines) - self.height, 0)
            elif letter == "K":
                lines[row] = ""
        return [line.rstrip() for line in lines]
