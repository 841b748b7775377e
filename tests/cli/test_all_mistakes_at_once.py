"""A request with several mistakes is told all of them, also where one hides what the others mean."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cli.main import main

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def signs(parameters, lr):
    return torch.optim.SGD(parameters, lr)


def net(depth=2):
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])


def data():
    return TensorDataset(torch.zeros(8, 4), torch.zeros(8, 4))
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "slips.py").write_text(MODULE)
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer" / "signs.yaml").write_text("# My own.\ntarget: slips:signs\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    yield
    sys.modules.pop("slips", None)


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        ("plan", "model=huggingfac data.batch_size=0", ("model = huggingfac: ", "data.batch_size = 0: ")),
        ("train", "optimizer=adamm optimizer.lr=-1", ("optimizer = adamm: ", "optimizer.lr = -1")),
        ("plan", "model=mlp parallelism.pipelin=2 zero.stage=7", ("parallelism.pipelin = 2: ", "zero.stage = 7: ")),
        (
            "train",
            "model.target=slips:net model.kwargs.dept=3 data.target=slips:dta loss=mse",
            ("data.target = slips:dta: ", "model.kwargs.dept = 3: "),
        ),
        (
            "plan",
            "model.target=slips:nett data.target=slips:dta loss=mse",
            ("data.target = slips:dta: ", "model.target = slips:nett: "),
        ),
        ("plan", "model=mlp model=mlpp optimizer=signs parallelism.data=2", ("model = mlpp: ",)),
        ("plan", "model.target=[1] optimizer=signs", ("model.target = [1]: ",)),
    ],
)
def test_every_mistake_is_a_line(
    command: str, words: str, told: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *words.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told), lines
    assert all(any(line.startswith(each) for line in lines) for each in told), lines


def test_what_depends_on_a_refused_choice_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    """24 micro-batches fit the default data's batch or not: which data the model brings is not known yet."""
    assert main(["plan", "model=huggingfac", "schedule.microbatches=1000", "data.kwargs.length=x"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
