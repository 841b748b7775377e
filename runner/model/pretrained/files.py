"""Finds the tensors of a pretrained model's files by their headers.

Nothing here can run code of a file: safetensors hold numbers alone, and pickles are refused, except for the metadata
of torch's distributed checkpoints, which may name their own classes alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from runner.errors import Problem, RequestError, raise_problems
from runner.model.pretrained.dcp import METADATA, tensors_of_checkpoint
from runner.model.pretrained.stored import PATH, StoredTensor

__all__ = ["CONFIG", "INDEX", "ONE_FILE", "config_problems", "has_architecture", "is_folder", "stored_tensors"]

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OF_RUN = "weights.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def is_folder(path: str) -> bool:
    """Whether a request's ``model.pretrained`` names a folder, and not one file; the path need not exist."""
    return Path(path).suffix not in (".safetensors", *_PICKLES)


def has_architecture(path: str) -> bool:
    """Whether a request's ``model.pretrained`` names a folder that says which architecture of transformers it is of."""
    return is_folder(path) and (Path(path) / CONFIG).is_file()


def config_problems(folder: str, name: str) -> Iterator[Problem]:
    """A problem if the folder does not hold the file from which the model's function reads the model's sizes.

    Args:
        folder: the folder, which need not exist.
        name: the file's name.
    """
    if not Path(folder).is_dir():
        yield Problem(PATH, folder, "must be a folder or a safetensors file", "There is no such folder")
    elif not Path(folder, name).is_file():
        rule, why = f"must hold {name}, from which the model is made", "It holds none"
        yield Problem(PATH, folder, rule, why, "a folder of `runner export --format huggingface`")


def stored_tensors(path: str) -> dict[str, StoredTensor]:
    """The tensors of a folder or a file by their names there.

    Raises:
        RequestError: there is no such folder or file, it holds no weights, a shard is missing, or it is a pickle.
    """
    return dict(_tensors_of_folder(Path(path)) if is_folder(path) else _tensors_of_file(Path(path), path))


def _tensors_of_folder(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    if not folder.is_dir():
        raise _refused(folder, "must be a folder or a safetensors file", "There is no such folder")
    if (folder / INDEX).is_file():
        yield from _tensors_of_shards(folder)
    elif (folder / ONE_FILE).is_file():
        yield from _tensors_of_file(folder / ONE_FILE, folder)
    elif (folder / METADATA).is_file():
        yield from tensors_of_checkpoint(folder)
    else:
        raise _refused(folder, f"must hold {ONE_FILE}, or shards and {INDEX}", _found_instead(folder), _near(folder))


def _found_instead(folder: Path) -> str:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        return f"It holds {pickles[0]}, a pickle, which may run code when it is read"
    return f"It holds {CONFIG} without weights" if (folder / CONFIG).is_file() else "It holds neither"


def _near(folder: Path) -> str:
    files = sorted(file.name for file in folder.iterdir() if file.suffix == ".safetensors")
    name = _OF_RUN if _OF_RUN in files else files[0] if len(files) == 1 else None
    return f"{PATH}={folder / name}" if name is not None else ""


def _tensors_of_shards(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    rule = "must have a readable index"
    try:
        shard_of = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(folder / INDEX, rule, f"{type(error).__name__}: {error}") from error
    if not isinstance(shard_of, dict) or not all(_is_beside(name) for name in shard_of.values()):
        raise _refused(folder / INDEX, rule, "It must name a file of this folder for each tensor")
    shards = sorted(set(shard_of.values()))
    raise_problems(_missing_shard(folder, name, shard_of) for name in shards if not (folder / name).is_file())
    held = {name: dict(_tensors_of_file(folder / name, folder)) for name in shards}
    absent = [name for name, shard in shard_of.items() if name not in held[shard]]
    if absent:
        why = f"{shard_of[absent[0]]} has no {absent[0]}"
        raise _refused(folder, "must have the tensors that its index names", why)
    yield from ((name, held[shard][name]) for name, shard in shard_of.items())


def _is_beside(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _missing_shard(folder: Path, name: str, shard_of: Mapping[str, str]) -> Problem:
    count = sum(shard == name for shard in shard_of.values())
    return Problem(PATH, folder, f"must hold {name}", f"{INDEX} says that {count} tensors are in it")


def _tensors_of_file(file: Path, shown: Path | str) -> Iterator[tuple[str, StoredTensor]]:
    if not file.is_file():
        raise _refused(shown, "must be a folder or a safetensors file", "There is no such file")
    if file.suffix in _PICKLES:
        raise _refused(shown, "must be safetensors", "It is a pickle by its name, which may run code when it is read")
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                part = opened.get_slice(name)
                yield name, StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise _refused(file, "must be a good safetensors file", str(error)) from error


def _refused(value: object, rule: str, why: str, fix: str = "") -> RequestError:
    return RequestError([Problem(PATH, value, rule, why, fix)])
