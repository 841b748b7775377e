"""Emoji and their Russian names as sequences of ids: built once, then read from a cache.

A sample's input is the caption's ids, begin and end marks and pads included, then the image's codes without
the last; its target is what follows each of these positions: the caption's ids from the second on, every pad
with the id of its position, then all of the image's codes.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from runner.recipes.rudalle import patches
from runner.recipes.rudalle.bpe import PAD, Bpe, train_bpe
from runner.recipes.rudalle.cache import cache_root, cached_folder, fingerprint
from runner.recipes.rudalle.captions import emoji_list
from runner.recipes.rudalle.emoji_images import DrawingSource, distinct_drawings, open_source

__all__ = [
    "NUM_TRAIN", "NUM_VALID", "EmojiConfig", "EmojiDataset", "EmojiFolder",
    "build", "facts_of", "prepare", "spec", "split",
]  # fmt: skip

NUM_TRAIN, NUM_VALID = 2474, 275
_NUM_PREVIEWS = 24  # valid images kept as pixels, for pictures
_FORMAT = 1  # of the folder; another number builds anew


@dataclass(frozen=True, slots=True)
class EmojiConfig:
    """What the data is made of.

    Args:
        source: ``emosvg`` (OpenMoji) or ``font``.
        font: path of a font with colour bitmaps, for ``source = font``.
        image_size: pixels per side.
        grid: image tokens per side; ``image_size / grid`` pixels per patch.
        codes: image tokens, code 0 being pure white.
        text_length: tokens of a caption, marks and pads included.
        text_vocab: most ids of the text tokenizer.
        seed: of the draw of 2749 images, of the split and of the k-means.
    """

    source: str = "emosvg"
    font: str | None = None
    image_size: int = 32
    grid: int = 8
    codes: int = 512
    text_length: int = 24
    text_vocab: int = 1024
    seed: int = 42

    @property
    def patch(self) -> int:
        """Pixels per side of a patch."""
        return self.image_size // self.grid


class EmojiDataset(TensorDataset):
    """Samples (input [T + G² - 1], target [same]), int64.

    Args:
        text: caption ids [n, T].
        codes: image codes [n, G²].
        text_vocab: first id of the pads in targets.
        captions: the captions as text.
        seen: bool [n], whether the caption is also a training caption (under another skin tone, say).
    """

    def __init__(self, text: Tensor, codes: Tensor, text_vocab: int, captions: list[str], seen: Tensor) -> None:
        pads = text_vocab + torch.arange(text.shape[1])
        text_targets = torch.where(text == PAD, pads, text)[:, 1:]
        super().__init__(torch.cat([text, codes[:, :-1]], dim=1), torch.cat([text_targets, codes], dim=1))
        self.captions = captions
        self.seen = seen


@dataclass(frozen=True)
class EmojiFolder:
    """A built folder, read.

    Args:
        config: what it was built from.
        captions: all 2749, the 2474 for training first.
        text: caption ids, int64 [2749, T].
        codes: image codes, int64 [2749, G²].
        codebook: float [codes, patch · patch · 3].
        previews: the first valid images, uint8 [n, size, size, 3].
        bpe: the text tokenizer.
    """

    config: EmojiConfig
    captions: list[str]
    text: Tensor
    codes: Tensor
    codebook: Tensor
    previews: Tensor
    bpe: Bpe

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [n, G²] to images, uint8 [n, size, size, 3]."""
        return patches.decode(codes, self.codebook, self.config.patch)

    def datasets(self) -> tuple[EmojiDataset, EmojiDataset]:
        """(train, val)."""
        return split(self.captions, self.text, self.codes, self.config.text_vocab, NUM_TRAIN)


def split(
    captions: list[str], text: Tensor, codes: Tensor, text_vocab: int, num_train: int
) -> tuple[EmojiDataset, EmojiDataset]:
    """(train, val) of tokens of which those for training come first; see :class:`EmojiDataset`."""
    known = set(captions[:num_train])
    seen = torch.tensor([caption in known for caption in captions])
    parts = slice(None, num_train), slice(num_train, None)
    train, val = (EmojiDataset(text[part], codes[part], text_vocab, captions[part], seen[part]) for part in parts)
    return train, val


def build(**kwargs: Any) -> tuple[EmojiDataset, EmojiDataset]:
    """(train, val) of :class:`EmojiConfig`'s arguments, from the cache or built into it.

    Raises:
        ValueError, FileNotFoundError: an argument that cannot be, a source that is not there.
    """
    return prepare(**kwargs).datasets()


def spec(**kwargs: Any) -> tuple[Tensor, Tensor]:
    """A sample of the right shapes and types, without preparing any data."""
    config = EmojiConfig(**kwargs)
    length = config.text_length + config.grid**2 - 1
    return torch.zeros(length, dtype=torch.long), torch.zeros(length, dtype=torch.long)


build.spec = spec  # type: ignore[attr-defined]  # so that a plan needs no data
_OF_CONFIG: tuple[Any, ...] = (build, spec)
for _function in _OF_CONFIG:  # so that messages name the arguments that there are
    _function.__signature__ = inspect.signature(EmojiConfig)


def prepare(**kwargs: Any) -> EmojiFolder:
    """The folder of :class:`EmojiConfig`'s arguments, with what pictures need besides the samples."""
    config = EmojiConfig(**kwargs)
    if config.image_size % config.grid:
        raise ValueError(f"data.kwargs.grid = {config.grid} must divide image_size = {config.image_size}")
    source = open_source(config.source, config.font)
    folder = cache_root() / f"emoji-{fingerprint(facts_of(config, source))}"
    return _read(cached_folder(folder, partial(_fill, config=config, source=source)), config)


def facts_of(config: EmojiConfig, source: DrawingSource) -> dict[str, object]:
    """What the tokens depend on: the request, the drawings, the names and the folder's format."""
    return {**asdict(config), "font": None, "identity": source.identity, "format": _FORMAT, "emoji": _version("emoji")}


def _fill(folder: Path, config: EmojiConfig, source: DrawingSource) -> None:
    captions = emoji_list()
    with _progress(len(captions) + NUM_TRAIN + NUM_VALID + 100 * patches.NUM_PASSES) as advance:
        chosen, images = _draw(captions, config, source, advance)
        cut = patches.to_patches(images, config.patch)
        codebook = patches.fit_codebook(cut[:NUM_TRAIN].flatten(0, 1), config.codes, config.seed, partial(advance, 100))
        texts = [captions[symbol] for symbol in chosen]
        bpe = train_bpe(texts[:NUM_TRAIN], config.text_vocab)
    tensors = {
        "text": torch.tensor(bpe.encode_batch(texts, config.text_length), dtype=torch.int16),
        "codes": patches.encode(cut, codebook).to(torch.int16),
        "codebook": codebook,
        "previews": images[NUM_TRAIN : NUM_TRAIN + _NUM_PREVIEWS].clone(),
    }
    torch.save(tensors, folder / "tensors.pt")
    words = {"captions": texts, "emoji": chosen, "pieces": bpe.pieces, "merges": bpe.merges}
    (folder / "texts.json").write_text(json.dumps(words, ensure_ascii=False))


def _draw(
    symbols: Iterable[str], config: EmojiConfig, source: DrawingSource, advance: Callable[[int], None]
) -> tuple[list[str], Tensor]:
    """The emoji drawn by lot, the training ones first, and their images, uint8 [n, size, size, 3]."""
    drawings = distinct_drawings(symbols, source, partial(advance, 1))
    chosen = sorted(drawings)
    random.Random(config.seed).shuffle(chosen)
    chosen = chosen[: NUM_TRAIN + NUM_VALID]
    if len(chosen) < NUM_TRAIN + NUM_VALID:
        why = f"it has {len(chosen)} distinct drawings of the {NUM_TRAIN + NUM_VALID} that are needed"
        raise ValueError(f"data.kwargs.source = {config.source}: {why}")
    images = []
    for symbol in chosen:
        images.append(source.render(drawings[symbol], config.image_size))
        advance(1)
    return chosen, torch.from_numpy(np.stack(images))


def _read(folder: Path, config: EmojiConfig) -> EmojiFolder:
    tensors = torch.load(folder / "tensors.pt", weights_only=True)
    words = json.loads((folder / "texts.json").read_text())
    bpe = Bpe(tuple(words["pieces"]), tuple((first, second) for first, second in words["merges"]))
    return EmojiFolder(
        config=config,
        captions=words["captions"],
        text=tensors["text"].long(),
        codes=tensors["codes"].long(),
        codebook=tensors["codebook"],
        previews=tensors["previews"],
        bpe=bpe,
    )


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("Preparing emoji (once)", total=total)
        yield lambda amount: progress.advance(task, amount)
