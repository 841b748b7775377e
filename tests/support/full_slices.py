"""Which tests marked ``full``, or slow, a slice has: every one is in exactly one slice, by a hash of its node id."""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

SLICES = 160
"""Into how many slices ``commit`` divides the tests marked ``full``."""

SLOW_SLICES = 3
"""Into how many slices ``commit`` divides the other slow tests."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One of ``count`` slices; numbers begin with 0."""

    number: int
    count: int

    def has(self, node_id: str) -> bool:
        """Whether a test is in this slice. The same on every machine, unlike Python's own ``hash``."""
        return int(hashlib.sha256(node_id.encode()).hexdigest(), 16) % self.count == self.number

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def read_slice(text: str, repository: Path, count: int = SLICES) -> Slice:
    """``N/COUNT``, or ``commit``: the one of ``count`` slices that the hash of the repository's commit chooses.

    Raises:
        ValueError: the text is neither, or the folder has no commit.
    """
    if text == "commit":
        return slice_of_commit(_commit(repository), count)
    if not (found := re.fullmatch(r"(\d+)/(\d+)", text)) or not int(found[1]) < int(found[2]):
        raise ValueError(f"{text}: must be commit or N/COUNT with N < COUNT")
    return Slice(int(found[1]), int(found[2]))


def slice_of_commit(commit: str, count: int = SLICES) -> Slice:
    """The slice of a commit, given as its hash in hexadecimal digits."""
    return Slice(int(commit, 16) % count, count)


def _commit(repository: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"commit: {done.stderr.strip() or 'git failed'}")
    return done.stdout.strip()
