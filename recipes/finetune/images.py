"""EfficientNet-Lite0 on drawings of emoji: from the weights of ImageNet, all trained or one layer, and from scratch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.recipes.finetune.commands import run, train
from runner.recipes.finetune.drawings import GROUPS, build
from runner.recipes.finetune.imagenet import write_pretrained
from runner.recipes.schedules.tables import markdown_table

__all__ = ["STARTS", "WEIGHTS", "markdown", "measure", "per_group", "read"]

_PREDICTIONS = "predictions.npy"

WEIGHTS = Path("outputs/finetune/efficientnet_lite0.safetensors")
"""The file that conf/recipe/finetune_images.yaml names."""

STARTS: Mapping[str, Sequence[str]] = {
    "ImageNet's weights": (),
    "ImageNet's weights, last layer alone": ("trainer.freeze=[_conv*,_bn*,_blocks*]",),
    "random weights": ("model.pretrained=null", "model.pretrained_strict=true"),
}
"""What each run is called, and the words of its request."""


def measure(out: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Train from every start, one after the other, and predict the held-out drawings.

    Args:
        out: the folder of the runs.
        words: further overrides of every run.

    Returns:
        see :func:`read`.
    """
    WEIGHTS.parent.mkdir(parents=True, exist_ok=True)
    write_pretrained(WEIGHTS)
    for run_dir, start in zip(_folders(out), STARTS.values(), strict=True):
        train(run_dir, "recipe=finetune_images", *start, *words)
        run("predict", run_dir, run_dir / _PREDICTIONS, "--set", "validation")
    return read(out)


def read(out: Path) -> dict[str, Any]:
    """What the finished runs in a folder have found.

    Returns:
        the number of drawings, and for each start accuracies and losses at validations as (step, value), and
        the predicted groups.
    """
    train_set, val_set = build()
    runs = {name: _figures(run_dir) for name, run_dir in zip(STARTS, _folders(out), strict=True)}
    return {"train": len(train_set), "val": len(val_set), "runs": runs}


def _folders(out: Path) -> list[Path]:
    return [out / f"images-{number}" for number in range(len(STARTS))]


def _figures(run_dir: Path) -> dict[str, Any]:
    record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    predicted = np.load(run_dir / _PREDICTIONS).argmax(axis=1).tolist()
    figures = {key: record[key] for key in ("steps", "val_accuracy", "val_loss")}
    return {**figures, "predicted": predicted}


def markdown(document: Mapping[str, Any]) -> str:
    """The table of the runs, below a line that says what was measured."""
    runs: Mapping[str, Any] = document["runs"]
    steps = next(iter(runs.values()))["steps"]
    told = f"{document['train']} drawings for training, {document['val']} held out; {steps} steps each."
    at = [step for step, _ in next(iter(runs.values()))["val_accuracy"]]
    header = ["starts from", *(f"accuracy, step {step}" for step in at), "loss, last"]
    rows = []
    for name, found in runs.items():
        cells = [f"{value:.3f}" for _, value in found["val_accuracy"]] + [f"{found['val_loss'][-1][1]:.3f}"]
        rows.append([name, *cells])
    return f"{told}\n\n{markdown_table(header, rows)}"


def per_group(document: Mapping[str, Any], groups: Sequence[int]) -> str:
    """The table of accuracies by group.

    Args:
        document: what :func:`measure` returns.
        groups: the true group of each held-out drawing.
    """
    counts = np.bincount(groups, minlength=len(GROUPS))
    rows = []
    for place, group in enumerate(GROUPS):
        right = [
            np.sum((np.array(found["predicted"]) == place) & (np.array(groups) == place))
            for found in document["runs"].values()
        ]
        rows.append([group, str(counts[place]), *(f"{each / counts[place]:.2f}" for each in right)])
    return markdown_table(["group", "held out", *document["runs"]], rows)
