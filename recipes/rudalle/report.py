"""After a run: what its weights reach on the valid images, beside simple baselines, and pictures of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.recipes.rudalle import patches
from runner.recipes.rudalle.data import NUM_TRAIN, EmojiFolder, prepare
from runner.recipes.rudalle.metrics import validate
from runner.recipes.rudalle.model import assemble
from runner.recipes.rudalle.pictures import draw_curve, draw_reconstructions, draw_samples
from runner.recipes.rudalle.sample import sample_images
from runner.recipes.rudalle.token_baselines import TokenBaselines, measure_baselines

__all__ = ["CAPTIONS", "after_run", "write_metrics"]

# Groups of which many drawings were trained on; single objects are beyond so small a model.
CAPTIONS = (
    "флаг япония",
    "флаг италия",
    "женщина бежит",
    "мужчина-полицейский",
    "женщина фермер",
    "гвардеец",
    "ладони лодочкой",
    "поднятый кулак",
)
_SAMPLES_PER_CAPTION = 4
_SAMPLE_SEED = 42


def after_run(run_dir: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, str]:
    """Write pictures and figures of a finished run into ``run_dir/pictures``.

    Args:
        run_dir: the run's directory; the curve is drawn from its ``record.json``.
        weights: the whole model's, by the names of :func:`~runner.recipes.rudalle.model.assemble`.
        config: the resolved configuration; ``model.kwargs`` and ``data.kwargs`` are read.

    Returns:
        Paths relative to ``run_dir`` by name: reconstructions, samples, curve (where the record has losses),
        baselines, metrics.

    Raises:
        RuntimeError: the weights are not of this model.
    """
    folder = prepare(**config["data"]["kwargs"])
    model = assemble(**config["model"]["kwargs"])
    model.load_state_dict({name: tensor.detach().cpu().float() for name, tensor in weights.items()})
    pictures = run_dir / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    baselines = _write_baselines(pictures / "baselines.json", folder)
    _write_metrics(pictures / "metrics.json", folder, model)
    _draw_reconstructions(pictures / "reconstructions.png", folder)
    _draw_samples(pictures / "samples.png", folder, model)
    names = ["reconstructions.png", "samples.png", "baselines.json", "metrics.json"]
    record = _read_record(run_dir)
    if record.get("loss"):
        validations = record.get("val_loss") or []
        draw_curve(pictures / "curve.png", record["loss"], validations, asdict(baselines))
        names.append("curve.png")
    return {Path(name).stem: f"pictures/{name}" for name in names}


def write_metrics(run_dir: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, str]:
    """:func:`after_run` without pictures, for the many runs of a sweep: ``pictures/metrics.json``."""
    folder = prepare(**config["data"]["kwargs"])
    model = assemble(**config["model"]["kwargs"])
    model.load_state_dict({name: tensor.detach().cpu().float() for name, tensor in weights.items()})
    (run_dir / "pictures").mkdir(parents=True, exist_ok=True)
    _write_metrics(run_dir / "pictures" / "metrics.json", folder, model)
    return {"metrics": "pictures/metrics.json"}


def _write_baselines(path: Path, folder: EmojiFolder) -> TokenBaselines:
    train, valid = folder.codes[:NUM_TRAIN], folder.codes[NUM_TRAIN:]
    baselines = measure_baselines(train, valid, folder.config.codes, folder.config.grid)
    path.write_text(json.dumps(asdict(baselines), indent=2))
    return baselines


def _write_metrics(path: Path, folder: EmojiFolder, model: nn.Module) -> None:
    _, val = folder.datasets()
    figures = {f"{name}_cross_entropy": value for name, value in asdict(validate(model, val)).items()}
    shown = slice(NUM_TRAIN, NUM_TRAIN + len(folder.previews))
    figures["tokenizer_psnr_db"] = patches.psnr(folder.previews, folder.decode(folder.codes[shown]))
    path.write_text(json.dumps(figures, indent=2))


def _draw_reconstructions(path: Path, folder: EmojiFolder) -> None:
    shown = slice(NUM_TRAIN, NUM_TRAIN + len(folder.previews))
    draw_reconstructions(path, folder.previews, folder.decode(folder.codes[shown]))


def _draw_samples(path: Path, folder: EmojiFolder, model: nn.Sequential) -> None:
    text = torch.tensor(folder.bpe.encode_batch(CAPTIONS, folder.config.text_length))
    generator = torch.Generator().manual_seed(_SAMPLE_SEED)
    codes = sample_images(model, text.repeat_interleave(_SAMPLES_PER_CAPTION, dim=0), generator)
    images = folder.decode(codes)
    trained = set(folder.captions[:NUM_TRAIN])
    notes = ["trained on" if caption in trained else "new" for caption in CAPTIONS]
    draw_samples(path, CAPTIONS, notes, images.view(len(CAPTIONS), _SAMPLES_PER_CAPTION, *images.shape[1:]))


def _read_record(run_dir: Path) -> Mapping[str, Any]:
    path = run_dir / "record.json"
    if not path.is_file():
        return {}
    record: dict[str, Any] = json.loads(path.read_text())
    return record
