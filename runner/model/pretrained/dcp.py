"""Reads folders of torch's distributed checkpoints, whose metadata is a pickle that may name a few classes alone."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.errors import Problem, RequestError
from runner.model.pretrained.stored import PATH, StoredTensor

__all__ = ["METADATA", "StoredPart", "tensors_of_checkpoint"]

METADATA = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_OTHERS = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


@dataclass(frozen=True)
class StoredPart(StoredTensor):
    """A tensor in a folder of torch's distributed checkpoints."""

    kind: torch.dtype = torch.float32

    def read(self) -> Tensor:
        """The tensor; only its own part of the files is read, which torch does without pickles."""
        from torch.distributed.checkpoint.state_dict_loader import load

        whole = {self.name: torch.empty(self.shape, dtype=self.kind)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is meant here
            load(whole, checkpoint_id=str(self.file), no_dist=True)
        return whole[self.name]


class _Metadata(pickle.Unpickler):
    """Constructs the classes of such metadata, and calls nothing else."""

    def find_class(self, module_name: str, name: str) -> Any:
        """The class or function; a torch dtype is an attribute of torch and no function.

        Raises:
            pickle.UnpicklingError: it is another one.
        """
        if (module_name, name) == ("builtins", "getattr"):
            return _member_of  # so Python before 3.11.4 writes a member of an enumeration
        is_dtype = module_name == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module_name, name) not in _OTHERS and not _is_metadata(module_name, name):
            raise pickle.UnpicklingError(f"its metadata would call {module_name}.{name}")
        return super().find_class(module_name, name)


def _member_of(kind: Any, name: str) -> Any:
    """The member of an enumeration, and nothing else that ``getattr`` could get.

    Raises:
        pickle.UnpicklingError: it is no enumeration, or has no such member.
    """
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError("its metadata would call builtins.getattr")
    return kind[name]


def _is_metadata(module_name: str, name: str) -> bool:
    return module_name == _METADATA_MODULE and name.lstrip("_")[:1].isupper() and "." not in name


def tensors_of_checkpoint(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors that the folder's metadata names.

    Raises:
        RequestError: the metadata is damaged, or would call something.
    """
    try:
        metadata = _Metadata(io.BytesIO((folder / METADATA).read_bytes())).load()
        listed = metadata.state_dict_metadata.items()
    except Exception as error:  # a damaged pickle may raise anything
        problem = Problem(PATH, folder, "must be a good distributed checkpoint", f"{type(error).__name__}: {error}")
        raise RequestError([problem]) from error
    for name, entry in listed:
        if hasattr(entry, "size"):  # another entry is a value that is no tensor
            kind: torch.dtype = entry.properties.dtype
            yield name, StoredPart(folder, name, tuple(entry.size), str(kind).removeprefix("torch."), kind)
