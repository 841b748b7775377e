"""One tensor in a file of weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

__all__ = ["PATH", "StoredTensor"]

PATH = "model.pretrained"
"""The key that names the files, for messages."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Args:
        file: the file.
        name: its name there.
        shape: its sizes.
        dtype: its type as the format names it, for example ``BF16``.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        """The tensor over the file's memory map, which ends with the tensor."""
        with safe_open(self.file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(self.name)
            return tensor
