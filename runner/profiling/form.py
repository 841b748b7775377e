"""What the model's and the data's functions of a request make and read, found out in a child process.

A profile is known by it, so that one that was taken of another model is not used again: the shapes and kinds of all
parameters and buffers and of the first micro-batch; the sources that are loaded afterwards; the files and the
environment variables that a user's code has read; and the packages that are installed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
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
from runner.plan.layout.batches import largest_microbatch
from runner.reads import digest_of_file, heard, hearing, installed

__all__ = ["digest_of_sources", "form_of"]

_OWN = "runner."
_OF_NUMBERS = "runner.zoo.data:"  # data that are made of a seed alone


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
    """The value of a function, and what it and a user's code before it have read."""
    with hearing(by_all=True):
        made = function()
    return {
        "made": made,
        "sources": {name: digest_of_file(Path(name)) for name in sorted(_users_sources())},
        "files": heard.files(),
        "environment": heard.variables(),
    }


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
        if file.endswith(".py") and not file.startswith((*installed(), own)) and os.path.isfile(file):
            yield file


def _files_of_package() -> Iterator[str]:
    """The Python files of this package, including the recipes, which are a symbolic link in a clone."""
    walked = os.walk(Path(runner.__file__).parent, followlinks=True)
    return (os.path.join(folder, name) for folder, _, names in walked for name in names if name.endswith(".py"))


def _packages() -> str:
    """Digest of the names and versions of installed packages."""
    names: set[str] = set()
    for folder in installed():
        with suppress(OSError):
            names.update(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
    return _digest("\n".join(sorted(names)).encode())
