"""After the fine-tuning on newer emoji: what the weights draw for held-out captions before it, and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from runner.recipes.rudalle.data import EmojiDataset, EmojiFolder, prepare
from runner.recipes.rudalle.later import build
from runner.recipes.rudalle.model import assemble
from runner.recipes.rudalle.pictures import draw_samples
from runner.recipes.rudalle.sample import sample_images

__all__ = ["after_run"]

_SHOWN = 4  # captions of each sort: new ones, and those that were trained on under another skin tone
_SAMPLES = 2
_SEED = 42


def after_run(run_dir: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, str]:
    """Draw ``run_dir/pictures/before_and_after.png``.

    It has a column for each of some held-out captions, half of which were trained on with another drawing. From top to
    bottom: the drawing as the tokenizer keeps it, two samples of the weights that the run started from, and two of
    those that it ended with, from the same random numbers.

    Args:
        run_dir: the run's directory.
        weights: the whole model's, by the names of :func:`~runner.recipes.rudalle.model.assemble`.
        config: the resolved configuration; ``model.kwargs``, ``model.pretrained`` and ``data.kwargs`` are read.

    Returns:
        The picture's path relative to ``run_dir``, by name.
    """
    folder = prepare(**config["data"]["kwargs"])
    _, held_out = build(**config["data"]["kwargs"])
    places = _shown(held_out)
    before = load_file(config["model"]["pretrained"])
    rows = [_drawings(folder, held_out, places)]
    rows += [_samples(folder, held_out, places, config["model"]["kwargs"], each) for each in (before, weights)]
    captions = [held_out.captions[place] for place in places]
    notes = ["trained on" if held_out.seen[place] else "new" for place in places]
    picture = run_dir / "pictures" / "before_and_after.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_samples(picture, captions, notes, torch.cat(rows, dim=1))
    return {"before_and_after": f"pictures/{picture.name}"}


def _shown(held_out: EmojiDataset) -> list[int]:
    """The places of some captions that the training had, and of some that it had not."""
    places: dict[str, int] = {}
    for place, caption in enumerate(held_out.captions):
        places.setdefault(caption, place)
    sorts = ([place for place in places.values() if bool(held_out.seen[place]) is seen] for seen in (True, False))
    return [place for sort in sorts for place in sort[:_SHOWN]]


def _drawings(folder: EmojiFolder, held_out: EmojiDataset, places: list[int]) -> Tensor:
    """The drawings, uint8 [captions, 1, size, size, 3]."""
    codes = torch.stack([held_out[place][1][-(folder.config.grid**2) :] for place in places])
    return folder.decode(codes)[:, None]


def _samples(
    folder: EmojiFolder, held_out: EmojiDataset, places: list[int], kwargs: dict[str, Any], weights: dict[str, Tensor]
) -> Tensor:
    """What weights draw for the captions, uint8 [captions, samples, size, size, 3]."""
    model: nn.Sequential = assemble(**kwargs)
    model.load_state_dict({name: tensor.detach().cpu().float() for name, tensor in weights.items()})
    text = torch.stack([held_out[place][0][: folder.config.text_length] for place in places])
    generator = torch.Generator().manual_seed(_SEED)
    images = folder.decode(sample_images(model, text.repeat_interleave(_SAMPLES, dim=0), generator))
    return images.view(len(places), _SAMPLES, *images.shape[1:])
