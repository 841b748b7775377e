"""Emoji that are newer than those of ``data=emoji``, in the tokens of that data: what its weights are fine-tuned on.

Captions are encoded by the tokenizer and drawings by the codebook that were made of the older emoji, so that each id
means what it meant to the weights.
"""

from __future__ import annotations

import inspect
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.recipes.rudalle import patches
from runner.recipes.rudalle.cache import cache_root, cached_folder, fingerprint
from runner.recipes.rudalle.captions import emoji_list, later_emoji_list
from runner.recipes.rudalle.data import EmojiConfig, EmojiDataset, EmojiFolder, facts_of, prepare, spec, split
from runner.recipes.rudalle.emoji_images import DrawingSource, distinct_drawings, open_source

__all__ = ["build", "chosen_drawings"]

_HELD_OUT = 10  # one of so many drawings is for validation


def build(**kwargs: Any) -> tuple[EmojiDataset, EmojiDataset]:
    """(train, val) of the newer emoji, from the cache or built into it; the arguments are :class:`EmojiConfig`'s.

    Raises:
        ValueError, FileNotFoundError: an argument that cannot be, a source that is not there.
    """
    older = prepare(**kwargs)
    source = open_source(older.config.source, older.config.font)
    folder = cache_root() / f"later-emoji-{fingerprint(facts_of(older.config, source))}"
    made = cached_folder(folder, partial(_fill, older=older, source=source))
    tensors = torch.load(made / "tensors.pt", weights_only=True)
    captions = json.loads((made / "captions.json").read_text(encoding="utf-8"))
    num_train = len(captions) - len(captions) // _HELD_OUT
    text, codes = (tensors[name].long() for name in ("text", "codes"))
    return split(captions, text, codes, older.config.text_vocab, num_train)


build.spec = spec  # type: ignore[attr-defined]  # so that a plan needs no data
_of_config: Any = build
_of_config.__signature__ = inspect.signature(EmojiConfig)  # so that messages name the arguments that there are


def chosen_drawings(source: DrawingSource) -> dict[str, bytes]:
    """Each newer emoji's drawing, without those that look exactly like another one, older ones included."""
    later = later_emoji_list()
    drawings = distinct_drawings([*emoji_list(), *later], source, lambda: None)
    return {symbol: drawing for symbol, drawing in drawings.items() if symbol in later}


def _fill(folder: Path, older: EmojiFolder, source: DrawingSource) -> None:
    config, captions, drawings = older.config, later_emoji_list(), chosen_drawings(source)
    symbols = sorted(drawings)
    random.Random(config.seed).shuffle(symbols)
    images = torch.from_numpy(np.stack([source.render(drawings[symbol], config.image_size) for symbol in symbols]))
    texts = [captions[symbol] for symbol in symbols]
    tensors = {
        "text": torch.tensor(older.bpe.encode_batch(texts, config.text_length), dtype=torch.int16),
        "codes": patches.encode(patches.to_patches(images, config.patch), older.codebook).to(torch.int16),
    }
    torch.save(tensors, folder / "tensors.pt")
    (folder / "captions.json").write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
