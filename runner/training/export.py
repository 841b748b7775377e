"""Writes a run's complete weights: one safetensors file that plain PyTorch loads, or a folder of another library."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner.checkpoint.file import (
    CheckpointError,
    PickledError,
    admitted,
    damage_of,
    newest_good_checkpoint,
    read_checkpoint,
)
from runner.checkpoint.parts import has_parts
from runner.config.formats import FORMATS, MAX_SHARD_SIZE
from runner.errors import Problem, RequestError, RunFailedError
from runner.files import new_file_beside
from runner.training.export_folders import merged, write_adapter, write_checkpoint, write_pretrained

__all__ = ["Exported", "export"]

logger = logging.getLogger(__name__)

_CHECKPOINTS = "checkpoints"
_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        source: the checkpoint or weight file that it came from.
        step: optimizer steps taken before the weights were saved; None if the source does not say.
        tensors, num_bytes: number of tensors, and their size.
    """

    source: Path
    step: int | None
    tensors: int
    num_bytes: int


def export(
    source: Path,
    file: Path,
    *,
    allow_pickle: Sequence[str] = (),
    form: str = FORMATS[0],
    dtype: torch.dtype | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> Exported:
    """Write the weights of ``source``, a run's directory or a checkpoint, to ``file``, and read them back to compare.

    Args:
        source: where the weights are.
        file: the file to write; a folder for the formats other than safetensors.
        allow_pickle: what the checkpoint may call, see :func:`runner.checkpoint.file.admitted`.
        form: one of :data:`runner.config.formats.FORMATS`.
        dtype: the type of floating-point tensors; None: their own.
        max_shard_size: the most bytes of one file of the format huggingface.

    Raises:
        RequestError: there are no valid weights in ``source``, ``file`` cannot be placed there, or the run's model or
            adapter has no such format.
        RunFailedError: the file system refuses, or the file differs when it is read back.
    """
    if form == FORMATS[0] and (file.is_dir() or not file.absolute().parent.is_dir()):
        rule = "must be a file in a folder that exists"
        raise RequestError([Problem("FILE", file, rule, fix=f"{file.stem or 'model'}.safetensors")])
    try:
        with admitted(allow_pickle):
            found, step, weights = _weights(source)
    except PickledError as error:
        fix = f"--allow-pickle {','.join([*allow_pickle, *error.names])}" if error.names else ""
        why = f"{error}; name what you trust" if error.names else str(error)
        rule = "must hold tensors and plain values"
        raise RequestError([Problem("RUN_DIR", error.path, rule, why, fix)]) from error
    own = weights if form == "peft" else merged(weights, source)
    whole = _apart(_converted(own, dtype))
    if form == "huggingface":
        write_pretrained(whole, file, source, max_shard_size)
    elif form == "peft":
        whole = write_adapter(whole, file, source)
    elif form == "dcp":
        write_checkpoint(whole, file)
    else:
        _write(whole, file, {"format": "pt", **({"step": str(step)} if step is not None else {})})
    return Exported(found, step, len(whole), sum(tensor.nbytes for tensor in whole.values()))


def _converted(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> Mapping[str, Tensor]:
    if dtype is None:
        return weights
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}


def _weights(source: Path) -> tuple[Path, int | None, Mapping[str, Tensor]]:
    if source.is_file() or (source.is_dir() and has_parts(source)):
        damage = damage_of(source)
        if damage is not None:
            raise RequestError([Problem("RUN_DIR", source, "must be a run's directory or a good checkpoint", damage)])
        return _of_checkpoint(source)
    if not source.is_dir():
        raise RequestError([Problem("RUN_DIR", source, "must be a run's directory", "There is no such directory")])
    newest, passed = newest_good_checkpoint(source / _CHECKPOINTS)
    for line in passed:
        logger.warning("%s", line)
    if newest is not None:
        return _of_checkpoint(newest)
    weights = source / _WEIGHTS
    if weights.is_file():
        try:
            return weights, None, load_file(weights)
        except (SafetensorError, OSError) as error:
            passed.append(f"{weights.name} is damaged: {error}")
    why = "; ".join(passed) or f"There is no {_CHECKPOINTS}/step-N.ckpt and no {_WEIGHTS} in it"
    raise RequestError([Problem("RUN_DIR", source, "must hold a good checkpoint", why)])


def _of_checkpoint(path: Path) -> tuple[Path, int | None, Mapping[str, Tensor]]:
    try:
        content = read_checkpoint(path)
    except CheckpointError as error:
        raise RequestError([Problem("RUN_DIR", path, "must be a good checkpoint", str(error))]) from error
    return path, int(content["global_step"]), content["state_dict"]


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors with separate storages, under every name: safetensors does not accept shared storages."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        shared = place in seen or tensor.untyped_storage().nbytes() != tensor.nbytes
        apart[name] = tensor.contiguous().clone() if shared else tensor.contiguous()
        seen.add(place)
    return apart


def _write(weights: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    temporary: Path | None = None
    try:
        handle, temporary = new_file_beside(file.absolute())
        rights = stat.S_IMODE(os.fstat(handle).st_mode)
        os.close(handle)
        save_file(weights, temporary, metadata)
        temporary.chmod(rights)  # the library may have put a file of its own there
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        _compare(weights, load_file(temporary))
        os.replace(temporary, file)
    except (OSError, SafetensorError) as error:
        raise RunFailedError(f"{file} could not be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            if temporary is not None:
                temporary.unlink(missing_ok=True)


def _compare(weights: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    different = [name for name in {**weights, **read} if not _same(weights.get(name), read.get(name))]
    if different:
        raise RunFailedError(f"what was written differs when it is read back: {', '.join(different[:3])}")


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
