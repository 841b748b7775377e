from __future__ import annotations

import json
import logging
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from runner.recipes.rudalle import baseline, data, patches, report
from runner.recipes.rudalle.cache import cache_root, cached_folder, fingerprint

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="session")
def folder(emoji_cache: Path) -> data.EmojiFolder:
    return data.prepare()


@pytest.mark.costly
def test_counts_and_alignment(folder: data.EmojiFolder) -> None:
    train, val = folder.datasets()
    assert (len(train), len(val)) == (2474, 275)
    inputs, targets = train[0]
    text, codes = folder.text[0], folder.codes[0]
    assert torch.equal(inputs, torch.cat([text, codes[:-1]]))
    assert torch.equal(targets[23:], codes)
    pads = text[1:] == 0
    assert pads.any()
    assert torch.equal(targets[:23][~pads], text[1:][~pads])
    assert torch.equal(targets[:23][pads], 1024 + torch.arange(1, 24)[pads])
    assert folder.bpe.decode(inputs[:24].tolist()) == train.captions[0]


def test_seen_captions(folder: data.EmojiFolder) -> None:
    train, val = folder.datasets()
    assert train.seen.all()
    assert val.seen.tolist() == [caption in set(train.captions) for caption in val.captions]
    assert 80 < int(val.seen.sum()) < 200


def test_tokens_carry_the_pictures(folder: data.EmojiFolder) -> None:
    shown = folder.decode(folder.codes[2474 : 2474 + len(folder.previews)])
    assert shown.shape == folder.previews.shape
    assert patches.psnr(folder.previews, shown) > 19
    assert (folder.codebook[0] == 255).all()
    assert int(folder.codes.max()) < 512


def test_second_call_reads_what_the_first_built(folder: data.EmojiFolder, emoji_cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in emoji_cache.glob("emoji-*/*.pt")}
    assert len(before) == 1
    again = data.prepare()
    assert torch.equal(again.codes, folder.codes)
    assert {path: path.stat().st_mtime_ns for path in emoji_cache.glob("emoji-*/*.pt")} == before


def test_spec_needs_no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: data.EmojiFolder) -> None:
    inputs, targets = folder.datasets()[0][0]
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "none"))
    shapes = vars(data.build)["spec"]()
    assert [(part.shape, part.dtype) for part in shapes] == [(part.shape, part.dtype) for part in (inputs, targets)]
    full = OmegaConf.load(CONF / "recipe/rudalle_malevich.yaml").data.kwargs
    assert data.spec(**full)[0].shape == (1151,)
    assert not (tmp_path / "none").exists()


def test_data_and_model_of_each_recipe_agree() -> None:
    for name in ("rudalle_tiny", "rudalle_malevich"):
        model = OmegaConf.load(CONF / f"model/{name}.yaml").kwargs
        emoji = OmegaConf.load(CONF / "data/emoji.yaml").kwargs
        emoji.update(OmegaConf.load(CONF / f"recipe/{name}.yaml").data.get("kwargs", {}))
        for of_model, of_data in (("text_vocab",) * 2, ("text_length",) * 2, ("grid",) * 2, ("image_vocab", "codes")):
            assert model[of_model] == emoji[of_data]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"source": "web"}, ValueError, "data.kwargs.source = web: must be emosvg or font"),
        ({"source": "font"}, ValueError, "needs the path of a font"),
        ({"source": "font", "font": "/nowhere/a.ttf"}, FileNotFoundError, "there is no such file"),
        ({"grid": 7}, ValueError, "grid = 7 must divide image_size = 32"),
    ],
)
def test_wrong_requests_are_named(kwargs: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        data.prepare(**kwargs)


def test_a_font_without_colour_bitmaps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.ttf"
    path.write_bytes(struct.pack(">IHHHH", 0x00010000, 0, 0, 0, 0))  # a font of no tables
    with pytest.raises(ValueError, match="no CBDT table"):
        data.prepare(source="font", font=str(path))
    path.write_bytes(b"not a font")
    with pytest.raises(ValueError, match="not a TrueType font"):
        data.prepare(source="font", font=str(path))


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("RUNNER_CACHE")
    assert cache_root() == Path.home() / ".cache" / "runner"


def test_fingerprint_changes_with_facts() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_damaged_cache_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fills = []

    def fill(folder: Path) -> None:
        fills.append(folder)
        (folder / "a.txt").write_text("whole")

    target = tmp_path / "data"
    for damage in (None, "cut", "gone", "sums"):
        if damage == "cut":
            (target / "a.txt").write_text("whol")
        elif damage == "gone":
            (target / "a.txt").unlink()
        elif damage == "sums":
            (target / "sha256.json").write_text("{")
        with caplog.at_level(logging.WARNING):
            assert cached_folder(target, fill) == target
        assert cached_folder(target, fill) == target
        assert (target / "a.txt").read_text() == "whole"
    assert len(fills) == 4
    assert caplog.text.count("is damaged") == 3


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        cached_folder(tmp_path / "data", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["data.lock"]


def test_only_one_of_many_builds(tmp_path: Path) -> None:
    fills = []

    def fill(folder: Path) -> None:
        fills.append(folder)
        (folder / "a.txt").write_text("whole")

    threads = [threading.Thread(target=cached_folder, args=(tmp_path / "data", fill)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fills) == 1


@pytest.mark.costly
def test_after_run_writes_pictures_and_figures(folder: data.EmojiFolder, tmp_path: Path) -> None:
    result = baseline.train(steps=2, batch=4, layers=1, width=32)
    losses = [float(loss) for loss in result.losses]
    (tmp_path / "record.json").write_text(json.dumps({"loss": losses, "val_loss": [[2, 6.0]]}))
    kwargs: dict[str, Any] = dict(OmegaConf.load(CONF / "model/rudalle_tiny.yaml").kwargs) | {"layers": 1, "width": 32}
    config = {"model": {"kwargs": kwargs}, "data": {"kwargs": dict(OmegaConf.load(CONF / "data/emoji.yaml").kwargs)}}
    found = report.after_run(tmp_path, result.model.state_dict(), config)
    assert set(found) == {"reconstructions", "samples", "curve", "baselines", "metrics"}
    assert all((tmp_path / path).stat().st_size > 0 for path in found.values())
    metrics = json.loads((tmp_path / found["metrics"]).read_text())
    assert metrics["image_cross_entropy"] == pytest.approx(result.validations[2].image, abs=1e-5)
    baselines = json.loads((tmp_path / found["baselines"]).read_text())
    assert baselines["uniform"] > baselines["unigram"] > baselines["position_unigram"] > baselines["left_bigram"]
    (tmp_path / "record.json").unlink()
    assert "curve" not in report.after_run(tmp_path, result.model.state_dict(), config)


def test_learning_rate_of_the_plain_loop() -> None:
    assert baseline.learning_rate(0, 550) == pytest.approx(1e-5)
    assert baseline.learning_rate(9, 550) == pytest.approx(1e-5 + 4.99e-3 * 0.5746, rel=1e-3)
    assert baseline.learning_rate(55, 550) == pytest.approx(5e-3)
    assert baseline.learning_rate(549, 550) < 3e-5
