"""An image tokenizer without a network: k-means over square patches. Code 0 is pure white.

It stands in for the VQGAN of the published model: crisp, blocky, and fitted in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["NUM_PASSES", "decode", "encode", "fit_codebook", "from_patches", "psnr", "to_patches"]

_SUBSET = 40_000
_SUBSET_PASSES, _FULL_PASSES = 8, 4
NUM_PASSES = _SUBSET_PASSES + _FULL_PASSES
_CHUNK = 8192  # patches compared with all codes at once
_WHITE = 255.0


def to_patches(images: Tensor, patch: int) -> Tensor:
    """uint8 [n, size, size, 3] to float [n, (size / patch)², patch · patch · 3] in reading order, values 0…255."""
    count, size = images.shape[:2]
    grid = size // patch
    cut = images.view(count, grid, patch, grid, patch, 3).permute(0, 1, 3, 2, 4, 5)
    return cut.reshape(count, grid * grid, patch * patch * 3).float()


def from_patches(patches: Tensor, patch: int) -> Tensor:
    """The inverse of :func:`to_patches`, rounded and clipped to uint8."""
    count, num_patches = patches.shape[:2]
    grid = int(num_patches**0.5)
    cut = patches.view(count, grid, grid, patch, patch, 3).permute(0, 1, 3, 2, 4, 5)
    return cut.reshape(count, grid * patch, grid * patch, 3).round().clamp(0, 255).to(torch.uint8)


def fit_codebook(patches: Tensor, num_codes: int, seed: int, advance: Callable[[], None] = lambda: None) -> Tensor:
    """Lloyd's algorithm from random patches: passes over subsets, then over all.

    Args:
        patches: float [n, features], values 0…255.
        num_codes: codes in all; code 0 is white, the others are fitted to the patches that are not.
        seed: of the first centres and of the subsets.
        advance: called after each of the ``NUM_PASSES`` passes.

    Returns:
        float [num_codes, features].

    Raises:
        ValueError: fewer patches that are not white than codes.
    """
    generator = torch.Generator().manual_seed(seed)
    coloured = patches[(patches != _WHITE).any(dim=1)]
    if len(coloured) < num_codes - 1:
        raise ValueError(f"codes = {num_codes}: there are only {len(coloured)} patches that are not white")
    centres = coloured[torch.randperm(len(coloured), generator=generator)[: num_codes - 1]].clone()
    for step in range(NUM_PASSES):
        points = coloured
        if step < _SUBSET_PASSES:
            points = coloured[torch.randperm(len(coloured), generator=generator)[:_SUBSET]]
        centres = _lloyd_pass(points, centres, generator)
        advance()
    return torch.cat([torch.full_like(centres[:1], _WHITE), centres])


def encode(patches: Tensor, codebook: Tensor) -> Tensor:
    """Nearest codes, int64 [...], of patches [..., features]."""
    flat = patches.flatten(0, -2)
    codes = torch.cat([_nearest(chunk, codebook) for chunk in torch.split(flat, _CHUNK)])
    return codes.view(patches.shape[:-1])


def decode(codes: Tensor, codebook: Tensor, patch: int) -> Tensor:
    """Codes [n, grid²] to images, uint8 [n, size, size, 3]."""
    return from_patches(codebook[codes], patch)


def psnr(images: Tensor, others: Tensor) -> float:
    """Mean over images of the peak signal-to-noise ratio in dB; both uint8 [n, size, size, 3]."""
    error = (images.float() - others.float()).square().flatten(1).mean(dim=1).clamp(min=1e-3)
    return float((10 * torch.log10(255**2 / error)).mean())


def _lloyd_pass(points: Tensor, centres: Tensor, generator: torch.Generator) -> Tensor:
    codes = encode(points, centres)
    counts = torch.bincount(codes, minlength=len(centres))
    moved = torch.zeros_like(centres).index_add_(0, codes, points) / counts.clamp(min=1)[:, None]
    empty = (counts == 0).nonzero().flatten()
    reseeds = torch.randint(len(points), (len(empty),), generator=generator)
    moved[empty] = points[reseeds]
    return moved


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    # The points' own squares do not change which centre is nearest.
    return torch.addmm(centres.square().sum(dim=1), points, centres.T, alpha=-2).argmin(dim=1)
