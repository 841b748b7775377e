"""A folder of this process's own on the drive that DeepSpeed swaps to, and writes that cannot fail without a word.

DeepSpeed names its files by rank alone, so that two runs with one ``offload.nvme_path`` would read each other's states;
and it does not look at what a write returned, so that a full drive would leave old bytes or zeros in a file.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner.config.units import format_bytes
from runner.errors import RunFailedError

__all__ = ["CheckedDrive", "SwapFolder", "checked_writes", "given_format"]

_PREFIX = "runner-swap-"
_LOCK = "lock"


class SwapFolder:
    """A folder below ``offload.nvme_path`` that lives as long as this object, or as the process.

    Folders of processes that were killed are removed, which are those whose lock nobody holds.

    Args:
        parent: ``offload.nvme_path``; it is made if it is not there.

    Raises:
        RunFailedError: the folder cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            made = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
            self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # It has its final name only with its lock, so that nobody takes it for an abandoned one.
            self.path = made.rename(parent / made.name.replace(".making-", _PREFIX))
        except OSError as error:
            raise RunFailedError(f"offload.nvme_path={parent}: no folder could be made: {error.strerror}") from error
        self.remove = weakref.finalize(self, _removed, self.path, self._lock)


class CheckedDrive:
    """DeepSpeed's handle of asynchronous reads and writes, which makes room for a file before it is written.

    Args:
        handle: the handle of DeepSpeed's ``async_io`` operator.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: Any, path: str, *more: Any) -> int:
        """Start to write a tensor to a file.

        Raises:
            RunFailedError: the drive has no room for it, or the folder is gone.
        """
        _make_room(Path(path), buffer.numel() * buffer.element_size())
        status: int = self._handle.async_pwrite(buffer, path, *more)
        return status

    def async_pread(self, buffer: Any, path: str, *more: Any) -> int:
        """Start to read a tensor from a file.

        Raises:
            RunFailedError: the file is gone.
        """
        if not os.path.exists(path):
            raise RunFailedError(_gone(Path(path)))
        status: int = self._handle.async_pread(buffer, path, *more)
        return status


@contextmanager
def checked_writes(operator: Any) -> Iterator[None]:
    """Every handle that DeepSpeed makes within the block is a :class:`CheckedDrive`.

    Args:
        operator: DeepSpeed's module ``async_io``, loaded.
    """
    make = operator.aio_handle
    operator.aio_handle = lambda *args, **keys: CheckedDrive(make(*args, **keys))
    try:
        yield
    finally:
        operator.aio_handle = make


@contextmanager
def given_format() -> Iterator[None]:
    """Within the block, DeepSpeed swaps weights in the format that they have.

    Where the processor has no arithmetic for float16, DeepSpeed 0.19.8 swaps weights in bfloat16 whatever they are, and
    they would come back from the drive in it: in ``Init._set_dtype`` the format that was given counts only where
    float16 is supported.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Parts

    choose = Parts._set_dtype

    def told(parts: Any, config: Any, dtype: Any) -> None:
        choose(parts, config, dtype)
        if dtype is not None:
            parts.dtype = dtype

    Parts._set_dtype = told
    try:
        yield
    finally:
        Parts._set_dtype = choose


def _make_room(path: Path, num_bytes: int) -> None:
    try:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(handle).st_size < num_bytes:
                os.posix_fallocate(handle, 0, num_bytes)
        finally:
            os.close(handle)
    except FileNotFoundError as error:
        raise RunFailedError(_gone(path)) from error
    except OSError as error:
        said = f"offload.nvme_path: no file of {format_bytes(num_bytes)} could be made in {path.parent}"
        raise RunFailedError(f"{said}: {error.strerror}; go on from the last checkpoint") from error


def _gone(path: Path) -> str:
    return f"offload.nvme_path: {path} is gone; go on from the last checkpoint"


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process removes it, or its owner is another user
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _removed(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
