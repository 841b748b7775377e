"""A checkpoint of another model is refused before a run starts, with the weights that differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.launch.run import resume
from runner.launch.run.resume import with_checkpoint
from runner.model.load import tensor_shapes
from runner.training.resume import History, Progress

DECAYING = """
from torch import linspace, nn


class Scaled(nn.Linear):
    def __init__(self, width, scale):
        super().__init__(width, width)
        self.scale = scale


def build(width=4):
    return nn.Sequential(*(Scaled(width, rate.item()) for rate in linspace(0, 1, 2)))  # no fake tensor has an item
"""


@pytest.fixture
def decaying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    (tmp_path / "decaying.py").write_text(DECAYING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return resolve(["model.target=decaying:build", "data=random_regression", "loss=mse"])


def test_a_model_that_no_fake_tensor_can_make_has_known_shapes(decaying: RunConfig) -> None:
    shapes = {"0.weight": (4, 4), "0.bias": (4,), "1.weight": (4, 4), "1.bias": (4,)}
    assert tensor_shapes(decaying) == shapes


def test_a_folder_of_another_models_run_is_not_advised(
    decaying: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = tmp_path / "other" / "step-3.ckpt"
    newest.parent.mkdir()
    monkeypatch.setattr(resume, "_newest_of", lambda paths: newest)
    progress = Progress(3, 3, None, History(), {}, {}, "")
    for width, told in ((5, "0.weight is (4, 4), in the checkpoint (5, 5)"), (4, f"Try resume={newest}.")):
        weights = {f"{layer}.weight": torch.zeros(width, width) for layer in range(2)}
        weights |= {f"{layer}.bias": torch.zeros(width) for layer in range(2)}
        monkeypatch.setattr("runner.training.resume.read_progress", lambda path, held=weights: (progress, held))
        with pytest.raises(RequestError) as caught:
            with_checkpoint(replace(decaying, resume=str(newest.parent)))
        assert told in str(caught.value)
        assert str(caught.value).startswith(f"resume = {newest.parent}: must be auto or a checkpoint's file.")
        assert ("Try" in told) == ("Try" in str(caught.value))
