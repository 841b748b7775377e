"""What would fail, or be wasted, is told before anything is traced or trained, and as what it is."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.utils.data import TensorDataset

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.traced.operators import trace
from runner.plan.layout.empty_microbatches import empty_microbatch_notes


class Positions(nn.Module):
    """A module without layers for ids of at most ``context`` places; it may look at its numbers, too."""

    def __init__(self, context: int, looks: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8, 4), nn.Parameter(torch.zeros(context, 4))
        self.out, self.looks = nn.Linear(4, 8), looks

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.looks and ids.sum() > 10**6:
            ids = ids + 1
        inner: torch.Tensor = self.out(self.tokens(ids) + self.places)
        return inner


def positions(context: int = 16, looks: bool = False) -> nn.Module:
    """The model of the requests below."""
    return Positions(context, looks)


def tokens() -> TensorDataset:
    """Eight samples of 16 ids."""
    ids = torch.zeros(8, 16, dtype=torch.long)
    return TensorDataset(ids, ids)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy over all places."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Scheduled(pl.LightningModule):
    """A module with a scheduler of its own, which the plain loop of verify does not step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def points() -> TensorDataset:
    """Eight samples of two classes."""
    return TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))


MODEL = f"model.target={__name__}:positions data.target={__name__}:tokens loss.target={__name__}:loss"
BASE = f"{MODEL} data.batch_size=8 device=cpu parallelism.pipeline=2"


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))


@pytest.mark.costly
@pytest.mark.parametrize("looks", [False, True])
def test_a_model_that_does_not_take_its_data_is_not_told_as_untraceable(
    looks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *BASE.split(), "model.kwargs.context=4", f"model.kwargs.looks={looks}"]) == 2
    told = capsys.readouterr().err
    assert (
        "must take what the data gives. Given (3, 16) int64, it raised RuntimeError: The size of tensor a (16)" in told
    )
    assert "traced" not in told
    assert "Try" not in told


@pytest.mark.costly
def test_a_model_that_only_the_trace_refuses_runs_without_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BASE.split(), "model.kwargs.looks=true"]) == 2
    told = capsys.readouterr().err
    assert "cannot be traced" in told
    assert told.endswith("Try parallelism.pipeline=1.\n")
    assert main(["plan", *BASE.split()[:-1], "model.kwargs.looks=true", "parallelism.pipeline=1"]) == 0


def test_ids_out_of_range_are_not_told_as_untraceable() -> None:
    ids = torch.full((3, 16), 9)
    with pytest.raises(RequestError, match=r"its largest id is 9, the table of tokens \(Embedding\) has 8 rows"):
        trace(Positions(16, looks=True), ids, "model")


def test_verify_refuses_a_scheduler_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*arguments: object) -> None:
        raise AssertionError("it was planned, and would be trained")

    monkeypatch.setattr("runner.launch.verify.prepare", start)
    request = f"model.target={__name__}:Scheduled data.target={__name__}:points data.batch_size=8 device=cpu"
    assert main(["verify", *request.split()]) == 2
    assert "must return an optimizer alone from configure_optimizers to be verified" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("samples", "said"), [(4, []), (3, ["1 of them never gets one"]), (1, ["3 of them never get one"])]
)
def test_replicas_without_samples_are_noted(samples: int, said: list[str]) -> None:
    notes = empty_microbatch_notes(resolve(["model=mlp", "parallelism.data=4", f"data.batch_size={samples}"]))
    assert [note.partition(": ")[2] for note in notes] == said


@pytest.mark.parametrize(("microbatches", "empty"), [(32, None), (64, 32)])
def test_micro_batches_without_samples_are_noted(microbatches: int, empty: int | None) -> None:
    words = ["model=mlp", "data.batch_size=32", f"schedule.microbatches={microbatches}"]
    said = [] if empty is None else [f"takes at most 32 samples: {empty} micro-batches are always empty"]
    notes = empty_microbatch_notes(resolve(words))
    assert len(notes) == len(said)
    assert all(words in note for words, note in zip(said, notes, strict=True))
