"""A folder of token ids that is written once, under a name made of everything that decides its contents."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cached", "content_key"]


def content_key(files: Iterable[Path], *facts: object) -> str:
    """A name of 24 hexadecimal digits that changes with the contents of the files, and with the facts."""
    whole = hashlib.sha256(repr(facts).encode())
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:24]


def cached(key: str, fill: Callable[[Path], None]) -> Path:
    """The folder of this key under ``$RUNNER_CACHE``, else ``~/.cache/runner``; ``fill`` writes it if it is not there.

    Processes that ask for the same folder wait for the one that writes it, and nobody sees a part of it.
    """
    root = Path(os.environ.get("RUNNER_CACHE") or Path.home() / ".cache" / "runner") / "text"
    folder = root / key
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{key}.lock"):
        if not folder.is_dir():
            building = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=root))
            try:
                fill(building)
                building.chmod(0o755)
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
