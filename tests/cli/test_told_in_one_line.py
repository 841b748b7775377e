"""Errors of a user's numbers and functions: one line with the cause, the traceback only where it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cli.main import main

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def words(vocab=128, classes=128):
    return nn.Sequential(nn.Embedding(vocab, 4), nn.Linear(4, classes))


class Positions(nn.Module):
    def __init__(self, context, added):
        super().__init__()
        self.tokens, self.places, self.added = nn.Embedding(128, 4), nn.Embedding(context, 4), added
        self.out = nn.Linear(4, 128)

    def forward(self, ids):
        inner = self.tokens(ids)
        places = self.places.weight[None] if self.added else self.places(torch.arange(ids.shape[1]))
        return self.out(inner + places)


def positions(context=16, added=False):
    return Positions(context, added)


def data(length=16):
    ids = torch.arange(8 * length).reshape(8, length) % 128
    ids[0, 0] = 127
    return TensorDataset(ids, ids)


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""
BASE = "model.target=own_words:words data.target=own_words:data loss.target=own_words:loss device=cpu data.batch_size=8"
OUT_OF_RANGE = [
    ("model.kwargs.vocab=64", "layer 0 (Embedding) must", "its largest id is 127, the table has 64 rows."),
    ("model.kwargs.classes=10", "the loss must", "its largest target is 127, the output has 10 classes."),
    (
        "model.target=own_words:positions model.kwargs.context=8",
        "layer 0 (Positions) must",
        "its largest id is 15, the table of places (Embedding) has 8 rows.",
    ),
    (
        "model.target=own_words:positions model.kwargs.context=8 parallelism.pipeline=2",
        "must take what",
        "its largest id is 15, the table of places (Embedding) has 8 rows.",
    ),
]


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_words.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    yield
    sys.modules.pop("own_words", None)


@pytest.mark.costly
@pytest.mark.parametrize(("overrides", "what", "numbers"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_told_with_its_table(
    overrides: str, what: str, numbers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *BASE.split(), *overrides.split()]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert told.endswith(f"{numbers}\n")
    assert len(told.splitlines()) == 1


def test_arguments_of_data_that_has_a_spec_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "data.kwargs.sequence_length=2048"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("data.kwargs.sequence_length = 2048: is no argument of ")
    assert len(told.splitlines()) == 1


def test_an_error_that_nothing_explains_is_one_line_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(name: str) -> None:
        raise KeyError("colour")

    monkeypatch.setattr("runner.cli.main._runner", wrong)
    assert main(["plan"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("KeyError: 'colour' (test_told_in_one_line.py:")
    assert told.endswith("RUNNER_FULL_ERROR=1 shows the whole traceback\n")
    assert len(told.splitlines()) == 1
    monkeypatch.setenv("RUNNER_FULL_ERROR", "1")
    assert main(["plan"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err
