"""Which earlier positions a position may attend to: the sparse masks of Malevich in closed form.

A sequence is ``text_length`` text positions, then a square image of ``grid`` x ``grid`` positions in
reading order. Masks are bool [seq, seq], row = query, column = key, True = visible. Every mask is causal
and shows all earlier text; they differ in the image keys that an image query sees.

Source: rudalle/dalle/image_attention.py of ai-forever/ru-dalle (Apache-2.0), whose loops these formulas equal.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["MaskKind", "layer_kinds", "layer_mask"]

MaskKind = Literal["row", "col", "conv", "causal"]


def layer_kinds(num_layers: int) -> list[MaskKind]:
    """The mask of each layer: col at 1, 5, 9, …, else row, and conv for the last unless that is a col layer."""
    kinds: list[MaskKind] = ["col" if (layer - 1) % 4 == 0 else "row" for layer in range(num_layers)]
    if kinds[-1] != "col":
        kinds[-1] = "conv"
    return kinds


def layer_mask(kind: MaskKind, text_length: int, grid: int, kernel: int, wraps: bool = False) -> Tensor:
    """The bool mask [text_length + grid², same] of one layer.

    Args:
        kind: ``row``: the ``grid`` positions before, and itself; ``col``: the same column; ``conv``: a
            window of ``kernel`` x ``kernel`` around; ``causal``: everything before.
        text_length: text positions in front of the image.
        grid: side of the image, in positions.
        kernel: side of the window of ``conv``, odd.
        wraps: ``conv`` measures distances on a torus (the second release) and not in the plane (the third).
    """
    position = torch.arange(text_length + grid * grid)
    query, key = position[:, None], position[None, :]
    image_query, image_key = query - text_length, key - text_length
    distance = image_query - image_key
    if kind == "row":
        near = distance <= grid
    elif kind == "col":
        near = distance % grid == 0
    elif kind == "conv":
        rows = _apart(image_query // grid, image_key // grid, grid, wraps)
        columns = _apart(image_query % grid, image_key % grid, grid, wraps)
        near = (rows <= kernel // 2) & (columns <= kernel // 2)
    else:
        near = distance >= 0
    return (key <= query) & (near | (key < text_length))


def _apart(first: Tensor, second: Tensor, side: int, wraps: bool) -> Tensor:
    apart = (first - second).abs()
    return torch.minimum(apart, side - apart) if wraps else apart
