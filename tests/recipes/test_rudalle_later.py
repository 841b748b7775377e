"""The newer emoji in the older ones' tokens, and the recipe that is fine-tuned on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import save_file
from torch.utils.data import ConcatDataset

from runner.config.compose.resolve import resolve, resolve_sweep
from runner.config.rules.sections import rules
from runner.recipes.rudalle import data, later, later_report
from runner.recipes.rudalle.captions import emoji_list, later_emoji_list
from runner.recipes.rudalle.emoji_images import OpenMoji
from runner.recipes.rudalle.model import assemble

SLOTH = "🦥"  # of 2019


@pytest.fixture(scope="module")
def older(emoji_cache: Path) -> data.EmojiFolder:
    return data.prepare()


def test_newer_emoji_are_none_of_the_older_ones() -> None:
    newer = later_emoji_list()
    assert not newer.keys() & emoji_list().keys()
    assert newer[SLOTH] == "ленивец"
    assert "🍕" not in newer
    source = OpenMoji()
    drawn = later.chosen_drawings(source)
    assert set(drawn) <= set(newer)
    assert not set(drawn.values()) & {source.find(symbol) for symbol in emoji_list()}


@pytest.mark.costly
def test_ids_mean_what_they_meant(older: data.EmojiFolder) -> None:
    """A caption's ids are the older tokenizer's, and the codes give back the drawing by the older codebook."""
    train, val = later.build()
    assert len(val) == (len(train) + len(val)) // 10
    assert older.bpe.decode(train[0][0][:24].tolist()) == train.captions[0]
    place = [*train.captions, *val.captions].index(later_emoji_list()[SLOTH])
    _, targets = ConcatDataset([train, val])[place]
    shown = older.decode(targets[None, 23:]).float()
    source = OpenMoji()
    image = torch.from_numpy(source.render(later.chosen_drawings(source)[SLOTH], 32).copy()).float()[None]
    assert (shown - image).abs().mean() < (shown - image.flip(1)).abs().mean() / 2


def test_its_requests_are_right() -> None:
    """The model, the batch and the steps are those of the run that the weights are from."""
    jobs = [resolve(words) for words in resolve_sweep(["recipe=rudalle_finetune"])]
    tiny = resolve(["recipe=rudalle_tiny"])
    assert [job.optimizer.lr for job in jobs] == [7.5e-6, 4e-5, 5e-4]
    for job in jobs:
        assert list(rules(job)) == []
        assert (job.model.kwargs, job.model.target) == (tiny.model.kwargs, tiny.model.target)
        assert (job.data.batch_size, job.trainer.max_steps) == (tiny.data.batch_size, tiny.trainer.max_steps)


@pytest.mark.costly
def test_what_was_drawn_before_and_after_is_shown(older: data.EmojiFolder, tmp_path: Path) -> None:
    """Samples of the same weights are the same, above and below."""
    sizes = resolve(["recipe=rudalle_tiny"]).model.kwargs
    weights = {name: value.contiguous() for name, value in assemble(**sizes).state_dict().items()}
    save_file(weights, tmp_path / "older.safetensors")
    config = {"model": {"kwargs": sizes, "pretrained": str(tmp_path / "older.safetensors")}, "data": {"kwargs": {}}}
    made = later_report.after_run(tmp_path, weights, config)
    assert made == {"before_and_after": "pictures/before_and_after.png"}
    picture = torch.from_numpy(imread(tmp_path / made["before_and_after"]))
    assert picture.shape[1] > picture.shape[0] > 100
    _, val = later.build()
    row = later_report._samples(older, val, [0, 1], sizes, weights)
    assert row.shape == (2, 2, 32, 32, 3)
    assert torch.equal(row, later_report._samples(older, val, [0, 1], sizes, weights))
