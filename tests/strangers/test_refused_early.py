"""What a run would meet at its first batches is refused by ``plan`` and ``train`` alike, and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from runner.cli.main import main

COUNT, WIDTH, CLASSES = 24, 6, 3


class Rows(Dataset[Any]):
    """Samples of which some cannot be read.

    Args:
        broken: the number of the first of them.
        width: of every sample.
        classes: of the labels.
    """

    def __init__(self, broken: int = COUNT, width: int = WIDTH, classes: int = CLASSES) -> None:
        self.broken, self.width, self.classes = broken, width, classes

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number >= self.broken:
            raise KeyError("column 'txet'")
        return torch.full((self.width,), float(number)), torch.tensor(number % self.classes)


class Stream(IterableDataset[Any]):
    """Rows one after the other."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[number] for number in range(len(self.rows)))


def build(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def rows(
    broken: int = COUNT,
    classes: int = CLASSES,
    validation: bool = False,
    val_broken: int = COUNT,
    val_width: int = WIDTH,
) -> Any:
    training = Rows(broken, classes=classes)
    return (training, Rows(val_broken, val_width)) if validation else training


def stream(broken: int = COUNT) -> Stream:
    return Stream(Rows(broken))


def table(path: str, column: str = "label") -> Rows:
    header = Path(path).read_text(encoding="utf-8").splitlines()[0].split(",")
    return Rows(classes=1 + header.index(column) % CLASSES)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean()


def raising(output: Tensor, target: Tensor) -> Tensor:
    raise KeyError("scores")


def ragged(samples: list[Any]) -> Any:
    return torch.zeros(len(samples) + 1, WIDTH), torch.zeros(len(samples), dtype=torch.long)


class Follows(pl.Callback):
    """A callback of a user's own that looks at a figure."""

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor


def stepping(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


HERE = __name__
BASE = f"model.target={HERE}:build data.target={HERE}:rows loss.target={HERE}:loss device=cpu logger=none"
WRONG = {
    "trainer.grad_clip_norm=-1": "must be a finite number above 0",
    "trainer.grad_clip_norm=nan": "must be a finite number above 0",
    "trainer.grad_clip_value=inf": "must be a finite number above 0",
    "trainer.grad_clip_norm=1 trainer.grad_clip_value=1": "must be null beside a largest norm",
    f"data.target={HERE}:table data.kwargs.path=absent.csv": "FileNotFoundError",
    f"data.target={HERE}:table data.kwargs.path=there.csv data.kwargs.column=lable": "'lable' is not in list",
    "data.kwargs.broken=5": "must have samples that load. Sample 5 raised KeyError: \"column 'txet'\"",
    f"data.target={HERE}:stream data.kwargs.broken=3": "must have samples that load. Sample 3 raised KeyError",
    f"data.collate={HERE}:ragged": "a tensor of shape (9, 6)",
    "data.kwargs.validation=true data.kwargs.val_broken=2": "must have samples for validation that load. Sample 2",
    f"metrics.a={HERE}:accuracy": "need a validation set",
    "callbacks=early_stopping trainer.val_every=1": "must be logged. The run logs loss",
    f"callbacks.x.target={HERE}:Follows callbacks.x.kwargs.monitor=val_los data.kwargs.validation=true": "be logged",
    f"callbacks.x.target={HERE}:Follows callbacks.x.kwargs.metric=loss": "must be arguments of",
    "logger=csv logger.kwargs.prefx=a": "is no argument of this logger. Its arguments are flush_logs_",
    "logger=tensorboard logger.kwargs.save_dir=a": "is no argument of this logger",
    f"logger=custom logger.target={HERE}:Follows": "must make a logger of lightning.pytorch",
    "logger=custom logger.target=lightning.pytorch.loggers:CSVLogger logger.kwargs.save_dri=a": "must be arguments of",
    f"optimizer=custom optimizer.target={HERE}:stepping optimizer.kwargs.nesterov=true": "must run with the arguments",
    "resume=nothing.ckpt": "There is no such file",
}
MEETING = {
    "data.kwargs.classes=5": "its largest target is 4, the output has 3 classes",
    "data.kwargs.validation=true data.kwargs.val_width=5": "must have a validation set that the model takes",
    f"data.kwargs.validation=true metrics.a={HERE}:raising": "must run on the model's output and the target",
}
"""What is seen where the model meets its first batches, for which there must be a profile."""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    Path("there.csv").write_text("text,label\n", encoding="utf-8")


def request_with(words: str) -> list[str]:
    """The base with what is wrong in the place of its own."""
    asked = words.split()
    named = {word.partition("=")[0] for word in asked}
    base = [word for word in BASE.split() if word.partition("=")[0] not in named]
    sizes = ["data.batch_size=8", "trainer.max_steps=2"]
    return [*base, *(word for word in sizes if word.partition("=")[0] not in named), *asked]


def _refused(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([command, *request_with(words)]) == 2
    assert {path.name for path in Path().iterdir()} <= {"there.csv", "cache"}
    return capsys.readouterr().err


@pytest.mark.costly
@pytest.mark.parametrize("words", WRONG)
def test_both_refuse_it_before_the_model_is_profiled(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "optimizer=custom" not in words:  # its function is called with a model's parameters

        def profiled(*_: object) -> None:
            raise AssertionError("the model is profiled")

        monkeypatch.setattr("runner.profiling.model._profile_model", profiled)
    planned, trained = (_refused(command, words, capsys) for command in ("plan", "train"))
    assert WRONG[words] in planned
    assert planned == trained
    assert planned.count("\n") == 1


@pytest.mark.costly
@pytest.mark.parametrize("words", MEETING)
def test_both_refuse_what_a_first_batch_shows(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    planned, trained = (_refused(command, words, capsys) for command in ("plan", "train"))
    assert MEETING[words] in planned
    assert planned.splitlines()[-1] == trained.splitlines()[-1]


@pytest.mark.costly
def test_samples_that_no_first_batch_has_do_not_refuse_a_plan() -> None:
    assert main(["plan", *request_with("data.kwargs.validation=true data.kwargs.broken=20")]) == 0
