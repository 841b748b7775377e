from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.recipes.rudalle.masks import layer_kinds, layer_mask

SETTINGS = [(5, 8, 5), (24, 8, 5), (4, 6, 3)]
FULL_SIZE = (128, 32, 11)


def by_loops(kind: str, text_length: int, grid: int, kernel: int, wraps: bool) -> Tensor:
    """The mask from the words of its definition: go through each query's neighbours and light them up."""
    length = text_length + grid * grid
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        mask[query, : min(query + 1, text_length)] = True
    for row in range(grid):
        for column in range(grid):
            query = row * grid + column
            for key in _neighbours(kind, row, column, grid, kernel, wraps):
                if 0 <= key <= query:
                    mask[text_length + query, text_length + key] = True
    return mask


def _neighbours(kind: str, row: int, column: int, grid: int, kernel: int, wraps: bool) -> list[int]:
    here = row * grid + column
    if kind == "row":
        return [here - back for back in range(grid + 1)]
    if kind == "col":
        return [above * grid + column for above in range(row + 1)]
    reach = range(-(kernel // 2), kernel // 2 + 1)
    cells = [(row + down, column + right) for down in reach for right in reach]
    if wraps:
        return [(r % grid) * grid + c % grid for r, c in cells]
    return [r * grid + c for r, c in cells if 0 <= r < grid and 0 <= c < grid]


@pytest.mark.parametrize(("text_length", "grid", "kernel"), [*SETTINGS, FULL_SIZE])
@pytest.mark.parametrize(("kind", "wraps"), [("row", False), ("col", False), ("conv", False), ("conv", True)])
def test_closed_forms_equal_loops(kind: str, wraps: bool, text_length: int, grid: int, kernel: int) -> None:
    closed = layer_mask(kind, text_length, grid, kernel, wraps)  # type: ignore[arg-type]
    assert torch.equal(closed, by_loops(kind, text_length, grid, kernel, wraps))


@pytest.mark.parametrize(("kind", "density"), [("row", 0.260), ("col", 0.235), ("conv", 0.289)])
def test_densities_at_full_size(kind: str, density: float) -> None:
    causal = layer_mask("causal", *FULL_SIZE)
    mask = layer_mask(kind, *FULL_SIZE)  # type: ignore[arg-type]
    assert (mask & ~causal).sum() == 0
    assert mask.sum().item() / causal.sum().item() == pytest.approx(density, abs=5e-4)


def test_kinds_of_the_layers() -> None:
    assert layer_kinds(4) == ["row", "col", "row", "conv"]
    kinds = layer_kinds(24)
    assert [index for index, kind in enumerate(kinds) if kind == "col"] == [1, 5, 9, 13, 17, 21]
    assert [index for index, kind in enumerate(kinds) if kind == "conv"] == [23]
    assert "conv" not in layer_kinds(6)  # its last is a col layer
