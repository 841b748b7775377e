"""A "Try" is printed where it is accepted and means what was asked; anywhere else there is none."""

from __future__ import annotations

import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.errors import did_you_mean

TRY = re.compile(r"Try (.+)\.$", re.MULTILINE)
HINTS = [
    ("optimizer=adamW", "optimizer=adamw"),
    ("schedule.microbatch=2", "schedule.microbatches=2"),
    ("max_steps=3", "trainer.max_steps=3"),
    ("--trainer.max_steps 3", "trainer.max_steps=3"),
    ("--optimizer sgd", "optimizer=sgd"),
    ("hydra.sweep.dir=x", "run_dir=x"),
    ("epochs=2", "trainer.max_epochs=2"),
]
NO_HINTS = [
    ("trainer.min_epochs=3", "trainer has "),
    ("trainer.max_stepps=three", "there is no such key"),
    ("device=gpu", "must be one of auto, cpu, cuda"),
    ("config=a.yaml", "there is no such key"),
    ("mlp", "an override is KEY=VALUE"),
    ("hydra.job.name=x", "Hydra's own settings are not used"),
    ("hardware.flops.fp32=-1", "must be a finite number above 0"),
    ("sweep_on_failure=perhaps", "must be one of continue, stop, ignore"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, so that a model is profiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_CACHE", str(cache))


def _told(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([command, "model=mlp", *words.split()]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("asked", "hint"), HINTS)
def test_a_hint_is_accepted(asked: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert TRY.findall(_told("plan", asked, capsys)) == [hint]
    assert rules(resolve(["model=mlp", hint])) == []


@pytest.mark.parametrize(("asked", "said"), NO_HINTS)
def test_what_means_another_thing_is_no_hint(asked: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = _told("plan", asked, capsys)
    assert said in told
    assert not TRY.findall(told)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("fp17", ("fp16", "fp32"), "fp16"),
        ("fp18", ("fp16", "fp19"), None),  # either could be meant
        ("widht", ("width", "depth"), "width"),
        ("1F1B", ("1f1b", "1f1b_eager"), "1f1b"),
        ("1f1b-eager", ("1f1b", "1f1b_eager"), "1f1b_eager"),
        ("max_epochs", ("max_steps",), None),
        ("gpu", ("cpu", "cuda"), None),
        ("adm", ("adam", "sgd"), "adam"),
        ("partion", ("partition", "wait"), "partition"),  # two letters of nine, though of seven that were typed
        ("interleaved", ("interleaved_1f1b", "1f1b"), "interleaved_1f1b"),
        ("zb_h", ("zb_h1", "zb_h2"), None),
        ("rudalle", ("rudalle_malevich", "rudalle_tiny"), None),
        ("max", ("max_steps",), None),
        ("", ("a", "b"), None),
        ("any", (), None),
    ],
)
def test_only_a_slip_of_the_keyboard_is_a_known_name(name: str, known: tuple[str, ...], meant: str | None) -> None:
    assert did_you_mean(name, known) == meant


def test_a_key_that_is_written_as_a_flag_takes_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    told = _told("train", "--resume DIR", capsys)
    assert TRY.findall(told) == ["resume=DIR"]
    assert len(told.splitlines()) == 1
    assert TRY.findall(_told("train", "--dry-run", capsys)) == ["launcher.dry_run=true"]


def test_weights_and_models_are_no_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    save_file({"weight": torch.zeros(2)}, tmp_path / "model" / "model.safetensors")
    for words, said in (
        ("resume=model", "This is a directory without a good checkpoint of a run"),
        ("resume=model/model.safetensors", "It holds weights alone"),
    ):
        told = _told("train", words, capsys)
        assert said in told
        assert "damaged" not in told
        assert not TRY.findall(told)


def test_trained_weights_are_not_asked_of_a_fresh_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    for field in ("pretrained_model_name_or_path", "name_or_path"):
        assert main(["plan", "model=huggingface", f"model.kwargs.{field}=gpt2"]) == 2
        told = capsys.readouterr().err
        assert f"{field} would load trained weights" in told
        assert "did you mean" not in told


class Module(pl.LightningModule):
    """One layer with AdamW, which keeps more defaults than it takes arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def points() -> TensorDataset:
    """Eight samples of two classes."""
    return TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))


@pytest.mark.costly
def test_the_states_of_adamw_are_observed(capsys: pytest.CaptureFixture[str]) -> None:
    request = f"model.target={__name__}:Module data.target={__name__}:points data.batch_size=8 device=cpu"
    assert main(["plan", *request.split()]) == 0
    shown = capsys.readouterr()
    assert "assumed" not in shown.err
    assert "64 B" in shown.out  # two states of eight numbers
