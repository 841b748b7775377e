"""Checkpoint files: written completely or not at all, checked before use, and read without running their code.

A file is what ``torch.save`` writes: a zip archive whose members carry CRC-32 sums. An incomplete file has no table of
contents, and changed bytes break a sum, so a damaged file can be recognised from the file alone. A directory is a
checkpoint in parts, see :mod:`runner.checkpoint.parts`; the functions here read it like a file.

Damage is what the bytes themselves show: a sum that fails, a part that is missing, an end that is cut off. A file that
the system does not hand over now (no permission, an input error, no memory) may be a good one. It is never passed
over, because a run that went on from an older checkpoint would lose the steps of the newer one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint.durable import TEMPORARY, CheckpointError, durably, first_line
from runner.checkpoint.parts import check_parts, put_together, read_parts
from runner.checkpoint.plain import given_back
from runner.config.rules.sections import may_be_called
from runner.errors import Problem, RunFailedError, raise_problems
from runner.files import sync_directory
from runner.targets import import_target

__all__ = [
    "CheckpointError",
    "PickledError",
    "admitted",
    "checkpoint_files",
    "checkpoint_name",
    "damage_of",
    "newest_good_checkpoint",
    "read_checkpoint",
    "remove_checkpoint",
    "remove_leftovers",
    "set_aside",
    "write_checkpoint",
]

_NAME = re.compile(r"step-(\d+)\.ckpt")
_CHUNK_BYTES = 1 << 22
_ALLOW = "checkpoint.allow_pickle"
_PASSED_OVER = "passed-over-"
_OF_SAFETENSORS = ".tmp??????"  # the file that safetensors writes, before it gets the name that it was told
# How torch words an error of the system that it met below Python, e.g. "unable to mmap 8 bytes …: … (12)".
_OF_SYSTEM = re.compile(r"unable to (?:open|stat|mmap|resize|close)\b.*\((\d+)\)")


class PickledError(CheckpointError):
    """A file that would call functions or classes that the user has not allowed.

    Attributes:
        path: the file.
        names: what it calls, ``package.module:name``, in the form that ``checkpoint.allow_pickle`` takes; empty if
            some of it may not be allowed by anybody.
    """

    def __init__(self, path: Path, called: Sequence[str]) -> None:
        refused = [name for name in called if not may_be_called(name)]
        told = f"it would call {', '.join(refused or called)}"
        told += " to make what is neither a tensor nor a plain value"
        super().__init__(f"{told}, which nothing allows: it may be an attack" if refused else told)
        self.path = path
        self.names = () if refused else tuple(called)


@contextlib.contextmanager
def admitted(names: Sequence[str]) -> Iterator[None]:
    """Within the block, files may call what ``names`` name, ``package.module:name`` each, and nothing else.

    Raises:
        RequestError: a name cannot be imported, or may not be called by any file.
    """
    refused = [name for name in names if not may_be_called(name)]
    rule, why = "cannot be allowed", "It is of Python's standard library, or no name"
    raise_problems(Problem(_ALLOW, name, rule, why, f"{_ALLOW}=[]") for name in refused)
    found: list[Any] = [(import_target(_ALLOW, name), name.replace(":", ".")) for name in names]
    with torch.serialization.safe_globals(found):
        yield


def checkpoint_name(step: int) -> str:
    """The file name of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step}.ckpt"


def checkpoint_files(directory: Path) -> dict[int, Path]:
    """The checkpoints in ``directory`` by step, oldest first, valid or not; none if there is no such directory.

    Raises:
        OSError: the directory cannot be read now.
    """
    found = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in directory.iterdir():  # unlike glob, it does not take a directory that it may not read as empty
            match = _NAME.fullmatch(path.name)
            if match is not None:
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def newest_good_checkpoint(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint without damage, and one line for each newer one that was skipped.

    Raises:
        PickledError: the newest may be valid, but it calls something that is not admitted.
        RunFailedError: a file that may be the newest valid one cannot be read now.
    """
    passed: list[str] = []
    try:
        files = checkpoint_files(directory)
    except OSError as error:
        raise _unreadable(directory, error) from error
    for path in reversed(files.values()):
        damage = damage_of(path)
        if damage is None:
            return path, passed
        passed.append(f"{path.name} is passed over: {damage}")
    return None, passed


def damage_of(path: Path) -> str | None:
    """Why the file cannot be trusted, or None for a valid one. Reads all of it.

    Raises:
        PickledError: the file may be valid, but it calls something that is not admitted.
        RunFailedError: the file cannot be read now, so that nothing can be said of it.
    """
    try:
        if path.is_dir():
            check_parts(path)
        elif path.suffix == ".safetensors":
            return "it holds weights alone, not the optimizer's states and the progress of a run"
        else:
            _check_sums(path)
        read_checkpoint(path, divided=True)
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, MemoryError) as error:
        raise _unreadable(path, error) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"it is damaged or cut short ({error})"
    except PickledError:
        raise
    except CheckpointError as error:
        return str(error)
    return None


def _unreadable(path: Path, error: OSError | MemoryError) -> RunFailedError:
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return RunFailedError(f"{path} cannot be read now ({cause}), and it may be good: nothing was changed, try it again")


def _check_sums(path: Path) -> None:
    """Compare the sums of an archive.

    Raises:
        zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError: the file is damaged;
            zipfile raises the last one where a name is no text, or a place is before the file's first byte.
        OSError: it cannot be read now.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as stream:  # reading to the end raises if the sum is wrong
                    while stream.read(_CHUNK_BYTES):
                        pass
    except (OSError, zipfile.BadZipFile) as error:
        # zipfile takes any error of the system in the table of contents for damage.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError) or cause.errno is None:
            raise
        if cause.errno != errno.EINVAL:
            raise cause from None
        # A damaged table of contents names a place before the file's first byte.
        raise zipfile.BadZipFile("its table of contents is wrong") from error


def read_checkpoint(path: Path, *, divided: bool = False) -> dict[str, Any]:
    """The content of a checkpoint; its tensors are memory-mapped, not read.

    Tensors that several parts of a checkpoint hold are put together, which needs memory for each; with ``divided`` each
    is a :class:`runner.checkpoint.parts.DividedTensor` instead.

    Only tensors and plain values (numbers, text, lists, tuples, dictionaries, None) are read, and what is
    :func:`admitted`. Anything else in the file is refused before it is constructed, so that an untrusted file runs no
    code. Values of the kinds of :mod:`runner.checkpoint.kinds` are made of plain ones.

    Raises:
        PickledError: the file holds something else.
        CheckpointError: the file is not a checkpoint.
        OSError, MemoryError: it cannot be read now.
    """
    content = read_parts(path) if path.is_dir() else _read_file(path)
    if not isinstance(content, dict) or not {"state_dict", "global_step"} <= content.keys():
        raise CheckpointError("it holds no state_dict and global_step of a training run")
    return given_back(content if divided or not path.is_dir() else put_together(content))


def _read_file(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        called = _called(path)
        if called:
            raise PickledError(path, called) from error
        raise CheckpointError(f"it holds what is neither a tensor nor a plain value: {first_line(error)}") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # includes errors of admitted classes
        of_system = _OF_SYSTEM.search(str(error)) if isinstance(error, RuntimeError) else None
        if of_system is not None:
            number = int(of_system[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise CheckpointError(f"it is damaged or no checkpoint: {first_line(error)}") from error


def _called(path: Path) -> list[str]:
    """What a file calls that is not admitted, found without calling it."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError):
        return []
    return sorted(":".join(name.rpartition(".")[::2]) for name in found)


def write_checkpoint(content: Mapping[str, Any], path: Path) -> None:
    """Write ``content`` durably under its name, or leave the earlier file unchanged.

    Raises:
        RunFailedError: the file system refuses, or :func:`read_checkpoint` would refuse the content.
    """
    with durably(path) as temporary:
        with temporary.open("wb") as file:
            torch.save(dict(content), file)
        read_checkpoint(temporary)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, a file or in parts; do nothing if there is none."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Give a checkpoint a name under which it is no longer found as one, durably, and return its new path."""
    attempt, aside = 0, path.with_name(f"{_PASSED_OVER}{path.name}")
    while aside.exists():
        attempt += 1
        aside = path.with_name(f"{_PASSED_OVER}{attempt}-{path.name}")
    path.rename(aside)
    sync_directory(path.parent)
    return aside


def remove_leftovers(directory: Path) -> None:
    """Delete unfinished files of killed writers; call it only while nobody writes."""
    for pattern in (f"{TEMPORARY}*", _OF_SAFETENSORS):
        for path in [*directory.glob(pattern), *directory.glob(f"*/{pattern}")]:
            path.unlink(missing_ok=True)
