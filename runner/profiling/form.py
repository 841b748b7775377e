"""What the model's and the data's functions of a request make and read, found out in a child process.

A profile is known by it, so that one that was taken of another model is not used again: the shapes and kinds of all
parameters and buffers and of the first micro-batch; the sources that are loaded afterwards; the files and the
environment variables that a user's code has read; and the packages that are installed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import runner
from runner.config.schema import RunConfig
from runner.errors import RunnerError
from runner.model.apart import ApartError, quietly
from runner.model.boundary import flatten
from runner.model.data import example_batch
from runner.model.fake import fake_tensors
from runner.model.layers import StageModule
from runner.model.load import LoadedModel, ask_whole_model
from runner.model.targets import is_users_file
from runner.plan.layout.batches import largest_microbatch

__all__ = ["digest_of_sources", "form_of"]

_READERS = {"os", "collections.abc"}  # modules through which variables of the environment are read
_OWN = "runner."
_OF_NUMBERS = "runner.zoo.data:"  # data that are made of a seed alone
_WHOLE_FILES = 16 << 20  # bytes; of larger files, size and time count


def form_of(config: RunConfig) -> dict[str, Any] | None:
    """What a request's functions make and read, as JSON can hold it; None if it cannot be found out.

    The runner's own models are told by their arguments alone. Others are made without memory, on the meta device if
    that is possible, which is the cheapest way.
    """
    if config.data.target.startswith(_OF_NUMBERS) and config.data.collate is None:
        _batch(config)  # here, so that the processes below and those of later requests need not make the data again
    kinds: tuple[Any, ...] = (partial(torch.device, "meta"), fake_tensors, nullcontext)
    for kind in kinds:
        with suppress(RunnerError, ApartError):
            return quietly(_recorded, partial(_made, config, kind))
    return None


def _made(config: RunConfig, kind: Callable[[], AbstractContextManager[Any]]) -> dict[str, Any]:
    batch = [_described(tensor) for part in _batch(config) for tensor in flatten(part)[0]]
    made = {"batch": batch, "packages": _packages()}
    if config.model.target.startswith(_OWN):
        return made
    return made | {"model": ask_whole_model(config, _form_of_model, kind)}


def _batch(config: RunConfig) -> tuple[Any, Any]:
    samples = largest_microbatch(config.data.batch_size, config.parallelism.data, config.schedule.parts)
    return example_batch(config.data, samples, config.seed)


def _form_of_model(_: LoadedModel, stage: StageModule) -> list[str]:
    named = [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]
    return [f"{stage.global_name(name)} {_described(tensor)} {tensor.requires_grad}" for name, tensor in named]


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"


def _recorded(function: Callable[[], Any]) -> dict[str, Any]:
    """The value of a function, and what it has read; this process must end soon, as the records are never taken off."""
    files: set[str] = set()
    variables: set[str] = set()

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike) and not _writes(args[1], args[2]):
            with suppress(Exception):
                files.add(os.path.abspath(os.fsdecode(args[0])))

    sys.addaudithook(hear)
    _hear_variables(variables)
    made = function()
    return {
        "made": made,
        "sources": {name: _digest_of_file(Path(name)) for name in sorted(_users_sources())},
        "files": {name: _digest_of_file(Path(name)) for name in sorted(files) if _is_data(name)},
        "environment": {name: _digest((os.environ.get(name) or "").encode()) for name in sorted(variables)},
    }


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))


def _hear_variables(variables: set[str]) -> None:
    """Note the environment variables that a user's code reads, through whatever function."""
    kind = type(os.environ)
    read = kind.__getitem__

    def hear(self: Any, name: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in {
            "os",
            "collections.abc",
            "_collections_abc",
        }:
            frame = frame.f_back
        if is_users_file(frame.f_code.co_filename):
            variables.add(str(name))
        return read(self, name)

    kind.__getitem__ = hear  # type: ignore[method-assign]


def _is_data(name: str) -> bool:
    """Whether a file is a user's, and no source, which count as such."""
    others = (*_installed(), sys.base_prefix, sys.prefix, "/proc", "/sys", "/dev", str(Path(runner.__file__).parent))
    return not name.startswith(others) and not name.endswith((".py", ".pyc")) and os.path.isfile(name)


def _digest_of_file(file: Path) -> str:
    state = file.stat()
    if state.st_size > _WHOLE_FILES:
        return f"{state.st_size} bytes of {state.st_mtime_ns}"
    return _digest(file.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of_sources() -> str:
    """Digest of this package's sources and of loaded modules outside the standard and installed libraries.

    All files of the package count, not only those that a command has loaded, so that a plan and a run share profiles.
    """
    digest = hashlib.sha256()
    for file in sorted({*_users_sources(), *_files_of_package()}):
        digest.update(file.encode())
        with suppress(OSError):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _users_sources() -> Iterator[str]:
    """Files of the modules that are loaded, without those of installed libraries and of this package."""
    own = str(Path(runner.__file__).parent) + os.sep
    for module in list(sys.modules.values()):
        file = str(getattr(module, "__file__", None))
        if file.endswith(".py") and not file.startswith((*_installed(), own)) and os.path.isfile(file):
            yield file


@cache
def _installed() -> tuple[str, ...]:
    return tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _files_of_package() -> Iterator[str]:
    """The Python files of this package, including the recipes, which are a symbolic link in a clone."""
    walked = os.walk(Path(runner.__file__).parent, followlinks=True)
    return (os.path.join(folder, name) for folder, _, names in walked for name in names if name.endswith(".py"))


def _packages() -> str:
    """Digest of the names and versions of installed packages."""
    names: set[str] = set()
    for folder in _installed():
        with suppress(OSError):
            names.update(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
    return _digest("\n".join(sorted(names)).encode())
