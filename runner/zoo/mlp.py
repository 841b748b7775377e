"""A multi-layer perceptron as one ``nn.Sequential``."""

from __future__ import annotations

from torch import nn

__all__ = ["build"]


def build(inputs: int, outputs: int, width: int, layers: int) -> nn.Sequential:
    """``layers`` linear layers with GELU between them; every hidden one has width ``width``.

    Args:
        inputs, outputs: features of a sample and of a prediction.
        width: hidden features.
        layers: total number of linear layers, at least 1; with one the model is linear.

    Raises:
        ValueError: ``layers`` is below 1.
    """
    if layers < 1:
        raise ValueError(f"layers = {layers} must be at least 1")
    sizes = [inputs, *[width] * (layers - 1), outputs]
    modules: list[nn.Module] = []
    for index in range(layers):
        linear = nn.Linear(sizes[index], sizes[index + 1])
        modules.append(linear if index == layers - 1 else nn.Sequential(linear, nn.GELU()))
    return nn.Sequential(*modules)
