"""What a stranger's checkpoint may hold: reading it runs this code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TRACE = "the file ran code"


class Thing:
    """Leaves a trace in the working directory when it is unpickled."""

    def __reduce__(self) -> Any:
        return leave_trace, (7,)


def leave_trace(value: int) -> int:
    Path(TRACE).touch()
    return value
