"""Emoji drawings and Unicode's group of each, as images for a network that was trained on ImageNet.

Drawings are OpenMoji's (CC BY-SA 4.0), as the package ``emosvg`` ships them; groups are Unicode's, as the package
``emojis`` ships them. Emoji with skin tones are not in that list, so that no drawing is another one in other colours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.recipes.rudalle.cache import cache_root, cached_folder, fingerprint
from runner.recipes.rudalle.emoji_images import OpenMoji, distinct_drawings

__all__ = ["GROUPS", "Drawings", "accuracy", "build", "spec"]

GROUPS = (
    "Smileys & Emotion", "People & Body", "Animals & Nature", "Food & Drink", "Travel & Places", "Activities",
    "Objects", "Symbols", "Flags",
)  # fmt: skip
"""Unicode's groups in Unicode's order; a target is a place in this list."""

RgbImages = np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]  # [number, height, width, 3]
_FORMAT = 1  # of the folder; another number builds anew
_HELD_OUT = 6  # one of so many drawings is for validation
_MEAN, _SPREAD = 127.0, 128.0  # of a pixel, as EfficientNet-Lite was trained


class Drawings(Dataset[tuple[Tensor, Tensor]]):
    """Samples (image float32 [3, size, size], group int64 []).

    Args:
        pixels: uint8 [n, size, size, 3], over white.
        groups: places in :data:`GROUPS`.
        symbols: the emoji themselves.
    """

    def __init__(self, pixels: RgbImages, groups: Sequence[int], symbols: Sequence[str]) -> None:
        self.pixels, self.groups, self.symbols = pixels, list(groups), list(symbols)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image = torch.from_numpy(np.array(self.pixels[number])).permute(2, 0, 1).float()
        return (image - _MEAN) / _SPREAD, torch.tensor(self.groups[number])


def build(size: int = 96, seed: int = 42) -> tuple[Drawings, Drawings]:
    """(train, val) of all drawings, from the cache or built into it.

    Args:
        size: pixels per side.
        seed: of the draw of those for validation.

    Raises:
        FileNotFoundError, ModuleNotFoundError: the package of the drawings, or that of the groups, is missing.
    """
    source = OpenMoji()
    facts: dict[str, object] = {"size": size, "seed": seed, "format": _FORMAT, "drawings": source.identity}
    facts["groups"] = f"emojis {version('emojis')}"
    made = cached_folder(cache_root() / f"drawings-{fingerprint(facts)}", partial(_fill, source, size, seed))
    pixels = np.load(made / "pixels.npy", mmap_mode="r")
    told = json.loads((made / "drawings.json").read_text(encoding="utf-8"))
    parts = slice(None, told["train"]), slice(told["train"], None)
    train, val = (Drawings(pixels[part], told["groups"][part], told["symbols"][part]) for part in parts)
    return train, val


def spec(size: int = 96, seed: int = 42) -> tuple[Tensor, Tensor]:
    """A sample of the right shapes and types, without preparing any data."""
    return torch.zeros(3, size, size), torch.tensor(0)


build.spec = spec  # type: ignore[attr-defined]  # so that a plan needs no data


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The part of the samples whose largest logit is the target's."""
    return (output.argmax(dim=1) == target).float().mean()


def _fill(source: OpenMoji, size: int, seed: int, folder: Path) -> None:
    """Draw everything into ``folder``, those for training first."""
    grouped = _groups()
    drawings = distinct_drawings(sorted(grouped), source, lambda: None)
    symbols = list(drawings)
    random.Random(seed).shuffle(symbols)
    num_train = len(symbols) - len(symbols) // _HELD_OUT
    np.save(folder / "pixels.npy", np.stack([source.render(drawings[symbol], size) for symbol in symbols]))
    told = {"train": num_train, "symbols": symbols, "groups": [grouped[symbol] for symbol in symbols]}
    (folder / "drawings.json").write_text(json.dumps(told), encoding="utf-8")


def _groups() -> dict[str, int]:
    """Emoji to the place of their group."""
    from emojis.db import get_emojis_by_category

    return {each.emoji: place for place, name in enumerate(GROUPS) for each in get_emojis_by_category(name)}
