"""File calls of a process that can be made to fail: open, write, fsync and replace, of files of the run alone."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from safetensors import SafetensorError

from runner.recipes.faults.acts import ShortWriteError
from runner.recipes.faults.shadow import Shadow

if TYPE_CHECKING:
    from runner.recipes.faults.inside import Injector

__all__ = ["Calls"]

_OF_DESCRIPTOR = "/proc/self/fd"


class Calls:
    """Replaces the functions by which Python code works with files, for this process.

    What native code writes by itself is not seen, except that of safetensors, which is one function.

    Args:
        injector: is told of each call.
        run_dir: calls on what lies elsewhere are left alone.
        shadow: notes what is synced; or None.
        syncs_directories: whether a directory is synced at all.
    """

    def __init__(self, injector: Injector, run_dir: Path, shadow: Shadow | None, *, syncs_directories: bool) -> None:
        self._injector = injector
        self._run_dir = str(run_dir)
        self._shadow = shadow
        self._syncs_directories = syncs_directories
        self._open, self._os_open, self._fsync = io.open, os.open, os.fsync
        self._replace, self._rename, self._rmtree = os.replace, os.rename, shutil.rmtree
        self._serialize: Any = vars(safetensors.torch)["serialize_file"]

    def install(self) -> None:
        own: dict[Any, dict[str, Any]] = {
            builtins: {"open": self.open},
            io: {"open": self.open},
            os: {"open": self.os_open, "fsync": self.fsync, "replace": self.replace, "rename": self.rename},
            shutil: {"rmtree": self.rmtree},
            safetensors.torch: {"serialize_file": self.serialize},
        }
        for module, functions in own.items():
            for name, function in functions.items():
                setattr(module, name, function)

    def reached(self, call: str, *, needs_space: bool = False) -> None:
        """A call is about to be made."""
        number = self._injector.state.errno
        if needs_space and number:
            raise OSError(number, os.strerror(number))
        self._injector.reached(f"call {call}{' of the command' if self._injector.role == 'command' else ''}")

    def open(self, file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
        if not self._is_of_run(file):
            return self._open(file, mode, buffering, *given, **named)
        writes = any(letter in mode for letter in "wax+")
        if not isinstance(file, int):
            self.reached("open", needs_space="w" in mode or "x" in mode)
        if not writes:
            return self._open(file, mode, buffering, *given, **named)
        return self._opened(file, mode, buffering, *given, **named)

    def _opened(
        self,
        file: Any,
        mode: str,
        buffering: int,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """A file as Python's own, but with raw writes that may fail."""
        raw = _Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.calls = self
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffer = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline, line_buffering=buffering == 1)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None and self._is_of_run(path):
            self.reached("open", needs_space=bool(flags & os.O_CREAT))
        return self._os_open(path, flags, mode, dir_fd=dir_fd)

    def fsync(self, descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if not self._is_of_run(number):
            self._fsync(number)
            return
        self.reached("fsync")
        if stat.S_ISDIR(os.fstat(number).st_mode) and not self._syncs_directories:
            return
        if self._shadow is None:  # nobody takes the power away: what the kernel knows is enough
            return
        self._shadow.synced(number)

    def replace(self, source: Any, target: Any, **named: Any) -> None:
        if self._is_of_run(target):
            self.reached("replace")
        self._replace(source, target, **named)

    def rename(self, source: Any, target: Any, **named: Any) -> None:
        self._rename(source, target, **named)
        if self._shadow is not None and self._is_of_run(target):
            self._shadow.moved(Path(source), Path(target))

    def rmtree(self, path: Any, *given: Any, **named: Any) -> None:
        self._rmtree(path, *given, **named)
        if self._shadow is not None and self._is_of_run(path):
            self._shadow.removed(Path(path))

    def serialize(self, tensors: Any, filename: Any, metadata: Any = None) -> None:
        if self._is_of_run(filename):
            try:
                self.reached("write", needs_space=True)
            except OSError as error:
                said = f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
                raise SafetensorError(said) from None
        self._serialize(tensors, filename, metadata)

    def _is_of_run(self, file: Any) -> bool:
        try:
            path = os.readlink(f"{_OF_DESCRIPTOR}/{file}") if isinstance(file, int) else os.path.abspath(file)
        except (OSError, TypeError):
            return False
        return f"{path}/".startswith(f"{self._run_dir}/")


class _Raw(io.FileIO):
    calls: Calls

    def write(self, data: Any) -> int:
        try:
            self.calls.reached("write", needs_space=True)
        except ShortWriteError:
            super().write(bytes(data)[: len(data) // 2])
            raise
        return super().write(data)
