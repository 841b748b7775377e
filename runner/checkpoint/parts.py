"""Checkpoints in parts: a directory with one file per rank, each of which can be checked by itself.

A part is a safetensors file. Its header holds the plain values as JSON and a SHA-256 over these and all tensors; no
byte of it is code. A part gets its name only when it is complete and on the disk, and a directory is a checkpoint when
the parts of all ranks are there. No rank waits for another, and an interrupted save can be told from a complete one.

torch.distributed.checkpoint has a safetensors storage, too. With every rank writing its own part, its ``finish`` leaves
no mark that the save was completed, its reader takes the files that it finds for the whole, and neither keeps sums
(torch 2.13, ``torch/distributed/checkpoint/hf_storage.py``: ``HuggingFaceStorageWriter.finish``,
``HuggingFaceStorageReader.read_metadata``). A checkpoint that lost a file or a bit would be loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runner.checkpoint.durable import CheckpointError, durably
from runner.model.sharded.values import Shard

__all__ = [
    "DividedTensor",
    "as_divided",
    "check_parts",
    "encoded",
    "has_parts",
    "put_together",
    "read_parts",
    "write_part",
]

_BY_WEIGHT = ("state_dict", "older_weight_versions", "averaged_weights")
_OPTIMIZERS = "optimizer_states"
_SHARDS = "shards"
"""Key, in a part, of how weights are divided of which this rank holds a part, by global name."""

_NAME = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")
_CONTENT, _SUM = "content", "sha256"
_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 22
_TENSOR, _TUPLE, _DICT = "tensor", "tuple", "dict"


@dataclass(frozen=True)
class DividedTensor:
    """A tensor of which several ranks have saved a part each. No memory is needed for it until it is put together.

    Args:
        shard: how it is divided, as one of the ranks tells it.
        parts: the parts that files hold, by their number, without padding.
    """

    shard: Shard
    parts: Mapping[int, Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return self.shard.whole

    def whole(self) -> Tensor:
        """The tensor, in memory of its own."""
        return self.shard.join([self.parts[index] for index in range(self.shard.degree)])


def as_divided(content: Mapping[str, Any], shards: Mapping[str, Shard]) -> dict[str, Any]:
    """The content of this rank's part, which says how the weights are divided of which it holds a part.

    Args:
        content: tensors of the shape of a part are under the global name of their weight. It may have padding, which is
            left out.
        shards: which part it is, by global name.
    """
    if not shards:
        return dict(content)
    bare = _of_weights(content, {name: (shard.shape, shard.without_padding) for name, shard in shards.items()})
    return {**bare, _SHARDS: {name: asdict(shard) for name, shard in shards.items()}}


def put_together(value: Any) -> Any:
    """A nest of a checkpoint in which every divided tensor is whole."""
    if isinstance(value, DividedTensor):
        return value.whole()
    if type(value) is dict:
        return {key: put_together(one) for key, one in value.items()}
    return type(value)(put_together(one) for one in value) if type(value) in (list, tuple) else value


def write_part(content: Mapping[str, Any], directory: Path, rank: int, ranks: int) -> None:
    """Write the part of ``rank`` of a checkpoint, durably.

    Args:
        content: tensors, each with its own memory, and plain values.

    Raises:
        RunFailedError: the file system refuses, or there is another kind of value.
    """
    with durably(directory / f"rank-{rank}-of-{ranks}.safetensors") as temporary:
        plain, tensors = encoded(content)
        found = _sum_of(plain, tensors, lambda name: [tensors[name].reshape(-1).view(torch.uint8).numpy()])
        save_file(tensors, temporary, {_CONTENT: plain, _SUM: found})


def encoded(content: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """The plain values of a part as JSON, and its tensors by name.

    Raises:
        CheckpointError: there is another kind of value.
    """
    tensors: dict[str, Tensor] = {}
    return json.dumps(_encoded(content, "", tensors)), tensors


def read_parts(directory: Path) -> dict[str, Any]:
    """The whole checkpoint; its tensors are memory-mapped, not read.

    One of which several ranks have saved a part each is a :class:`DividedTensor`. Entries that several parts have, such
    as the settings of an optimizer, are taken from the lowest rank.

    Raises:
        CheckpointError: a part is missing or damaged.
        OSError: a part cannot be read now.
    """
    whole: dict[str, Any] = {}
    for path in _parts(directory):
        plain, _, tensors = _read(path)
        try:
            whole = _merged(whole, _with_divided(_decoded(json.loads(plain), tensors)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path.name} is no part of a checkpoint ({error!r})") from error
    _require_all_parts(whole)
    return whole


def has_parts(directory: Path) -> bool:
    """Whether a directory is a checkpoint in parts, valid or not."""
    return any(_NAME.fullmatch(path.name) for path in directory.iterdir())


def check_parts(directory: Path) -> None:
    """Read all parts and compare their sums.

    The bytes are read from the file, not through the memory map: an error of the disk under a map would kill the
    process by SIGBUS.

    Raises:
        CheckpointError: a part is missing or damaged.
        OSError: a part cannot be read now.
    """
    for path in _parts(directory):
        plain, expected, tensors = _read(path)
        with path.open("rb") as file:
            found = _sum_of(plain, tensors, _bytes_in(file))
        if found != expected:
            raise CheckpointError(f"{path.name} is damaged: its bytes do not have the sum that was written with them")


def _parts(directory: Path) -> list[Path]:
    """The files of the parts, in the order of ranks.

    Raises:
        CheckpointError: a part is missing, or there are parts of several saves.
    """
    found: dict[int, dict[int, Path]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    if len(found) != 1:
        raise CheckpointError("it holds parts of several saves" if found else "it holds no part of a checkpoint")
    ((ranks, parts),) = found.items()
    missing = [rank for rank in range(ranks) if rank not in parts]
    if missing:
        raise CheckpointError(f"it was cut short: the part of rank {missing[0]} of {ranks} is not there")
    return [parts[rank] for rank in range(ranks)]


def _read(path: Path) -> tuple[str, str, dict[str, Tensor]]:
    """The plain values as JSON, the saved sum, and the tensors."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            return header[_CONTENT], header[_SUM], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path.name} is damaged or no part of a checkpoint ({error})") from error


def _sum_of(plain: str, tensors: Mapping[str, Tensor], bytes_of: Callable[[str], Iterable[Any]]) -> str:
    """The sum over the plain values and over the bytes of every tensor, which ``bytes_of`` gives by name."""
    total = hashlib.sha256(plain.encode())
    for name in sorted(tensors):
        total.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        for data in bytes_of(name):
            total.update(data)
    return total.hexdigest()


def _bytes_in(file: BinaryIO) -> Callable[[str], Iterator[bytes]]:
    """A function that reads the bytes of a tensor, given its name, from a safetensors file.

    Source: the format's description, https://huggingface.co/docs/safetensors: the length of the header in 8 bytes, the
    header as JSON, and the tensors at offsets from the header's end.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    header = json.loads(file.read(length))

    def read(name: str) -> Iterator[bytes]:
        first, end = header[name]["data_offsets"]
        file.seek(_LENGTH_BYTES + length + first)
        for at in range(first, end, _CHUNK_BYTES):
            yield file.read(min(_CHUNK_BYTES, end - at))

    return read


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` for JSON, which has neither tuples nor integer keys; its tensors are put into ``tensors``."""
    match value:
        case Tensor():
            tensors[path] = value
            return {_TENSOR: path}
        case tuple():
            return {_TUPLE: [_encoded(one, f"{path}/{number}", tensors) for number, one in enumerate(value)]}
        case list():
            return [_encoded(one, f"{path}/{number}", tensors) for number, one in enumerate(value)]
        case dict() if all(isinstance(key, str | int | float | None) for key in value):
            pairs = [[key, _encoded(one, f"{path}/{key}" if path else str(key), tensors)] for key, one in value.items()]
            return {_DICT: pairs}
        case None | bool() | int() | float() | str():
            return value
    raise CheckpointError(f"{path} is a {type(value).__name__}, neither a tensor nor a plain value")


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`_encoded`."""
    if isinstance(value, list):
        return [_decoded(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == _TENSOR:
        return tensors[inner]
    if kind == _TUPLE:
        return tuple(_decoded(one, tensors) for one in inner)
    return {key: _decoded(one, tensors) for key, one in inner}


def _with_divided(content: dict[str, Any]) -> dict[str, Any]:
    """A part's content, in which what belongs to other ranks' parts of one tensor is a :class:`DividedTensor`."""
    shards = {name: Shard(**{**each, "whole": tuple(each["whole"])}) for name, each in content.pop(_SHARDS, {}).items()}

    def divided(shard: Shard) -> Callable[[Tensor], DividedTensor]:
        return lambda part: DividedTensor(replace(shard, index=0), {shard.index: part})

    return _of_weights(content, {name: (shard.bare_shape, divided(shard)) for name, shard in shards.items()})


def _of_weights(
    content: Mapping[str, Any], known: Mapping[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]]
) -> dict[str, Any]:
    """``content`` in which a function has been applied to what stands under a weight's name and has one shape.

    Args:
        known: the shape and the function by global name. What users save under such a name is left as it is.
    """

    def within(value: Any, name: str | None) -> Any:
        if isinstance(value, Tensor):
            return known[name][1](value) if name is not None and tuple(value.shape) == known[name][0] else value
        if type(value) is dict:
            return {key: within(one, key if key in known else name) for key, one in value.items()}
        return type(value)(within(one, name) for one in value) if type(value) in (list, tuple) else value

    def of_states(entry: Mapping[str, Any]) -> dict[str, Any]:
        """What a rank keeps for itself, such as errors of compression, has its shape, and is no part of a tensor."""
        return {key: within(one, None) if key == "state" else one for key, one in entry.items()}

    found = {key: within(one, None) if key in _BY_WEIGHT else one for key, one in content.items()}
    if _OPTIMIZERS in content:
        found[_OPTIMIZERS] = [of_states(entry) for entry in content[_OPTIMIZERS]]
    return found


def _require_all_parts(value: Any, name: str = "") -> None:
    """See that each divided tensor is there with all of its parts.

    Raises:
        CheckpointError: a part is in no file.
    """
    if isinstance(value, DividedTensor):
        missing = [index for index in range(value.shard.degree) if index not in value.parts]
        if missing:
            raise CheckpointError(f"it holds no part {missing[0]} of {value.shard.degree} of {name}")
    elif isinstance(value, dict):
        for key, one in value.items():
            _require_all_parts(one, str(key))
    elif isinstance(value, list | tuple):
        for one in value:
            _require_all_parts(one, name)


def _merged(first: Any, second: Any) -> Any:
    if isinstance(first, DividedTensor) and isinstance(second, DividedTensor) and first.shard == second.shard:
        return DividedTensor(first.shard, {**second.parts, **first.parts})
    if isinstance(first, dict) and isinstance(second, dict):
        added = {key: value for key, value in second.items() if key not in first}
        return {key: _merged(value, second[key]) if key in second else value for key, value in first.items()} | added
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_merged(one, other) for one, other in zip(first, second, strict=True)]
    return first
