"""How a rank tells its failure to the command if the run's directory is full, read-only or gone.

The command opens a file that has no name, in memory where the system can do so, and every rank inherits it. Each write
of a rank goes behind what others have written, because all of them share one position in the file.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict

from runner.launch.failure import RankFailure

__all__ = ["REPORTS_VARIABLE", "HandedOver", "hand_over"]

REPORTS_VARIABLE = "RUNNER_REPORTS_FD"
"""The environment variable that names the file's descriptor in a rank."""


class HandedOver:
    """The file, in the command."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("failures")
        else:
            self._descriptor, name = tempfile.mkstemp()
            os.unlink(name)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> dict[int, RankFailure]:
        """What has been left there, by rank."""
        size = os.fstat(self._descriptor).st_size
        lines = [json.loads(line) for line in os.pread(self._descriptor, size, 0).splitlines()]
        return {line["rank"]: RankFailure(**line["failure"]) for line in lines}

    def close(self) -> None:
        os.close(self._descriptor)


def hand_over(rank: int, failure: RankFailure) -> None:
    """Tell the command; nothing happens in a rank that no command of the runner has started."""
    if REPORTS_VARIABLE in os.environ:
        line = json.dumps({"rank": rank, "failure": asdict(failure)}) + "\n"
        os.write(int(os.environ[REPORTS_VARIABLE]), line.encode())
