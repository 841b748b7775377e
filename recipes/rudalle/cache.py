"""A folder that is built once, whole or not at all, whoever of several processes comes first."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_root", "cached_folder", "fingerprint"]

logger = logging.getLogger(__name__)

_SUMS = "sha256.json"


def cache_root() -> Path:
    """``$RUNNER_CACHE``, else ``~/.cache/runner``."""
    return Path(os.environ.get("RUNNER_CACHE") or Path.home() / ".cache" / "runner")


def fingerprint(facts: dict[str, object]) -> str:
    """Twelve hexadecimal digits that change with ``facts``."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def cached_folder(folder: Path, fill: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``fill`` unless it is there with every file as it was written.

    Processes that ask for the same folder wait for the one that builds it. A folder with missing or changed
    files is built again.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if _is_whole(folder):
            return folder
        if folder.exists():
            logger.warning("%s is damaged: building it again", folder)
            shutil.rmtree(folder)
        building = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
        try:
            fill(building)
            (building / _SUMS).write_text(json.dumps(_sums(building)))
            building.chmod(0o755)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _SUMS).read_text()) == _sums(folder))
    except (OSError, ValueError):
        return False


def _sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != _SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
