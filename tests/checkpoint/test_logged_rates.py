"""The learning rate that is logged of a step is the one with which that step changed the weights."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from resume_runs import run_here
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import TensorDataset

USED: list[float] = []
SEEN: list[float] = []
RUN = ("model.target=test_logged_rates:build", "data.target=test_logged_rates:data", "data.batch_size=8", "device=cpu",
       "trainer.max_steps=7", "trainer.progress=false", "checkpoint.every=1")  # fmt: skip


class Notes(torch.optim.SGD):
    """Notes the rate with which it changes weights."""

    def step(self, closure: Any = None) -> Any:
        USED.append(self.param_groups[0]["lr"])
        return super().step(closure)


class Lit(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Linear(6, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = Notes(self.parameters(), lr=0.5)
        if self.kind in ("step", "epoch"):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": self.kind}]
        return optimizer

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.kind == "own_step":
            optimizer.param_groups[0]["lr"] = 0.2 * (self.global_step + 1)
        optimizer.step(closure=optimizer_closure)


class Watch(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        SEEN.append(float(trainer.callback_metrics["lr"]))


def notes(parameters: list[torch.Tensor], lr: float) -> Notes:
    return Notes(parameters, lr=lr)


def build(kind: str = "layers") -> Any:
    torch.manual_seed(3)
    return Lit(kind) if kind != "layers" else nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 6, generator=generator), torch.randint(0, 4, (24,), generator=generator))


def logged(run_dir: Path, name: str = "lr") -> list[float]:
    text = (run_dir / "csv" / "metrics.csv").read_text(encoding="utf-8")
    return [float(row[name]) for row in csv.DictReader(text.splitlines()) if row.get(name)]


@pytest.fixture(autouse=True)
def _nothing_used() -> None:
    USED.clear()
    SEEN.clear()


OPTIMIZER = ("optimizer=custom", "optimizer.target=test_logged_rates:notes", "optimizer.lr=0.5")
KINDS: dict[str, tuple[str, ...]] = {
    "warmup": (*OPTIMIZER, "lr_scheduler=cosine", "lr_scheduler.warmup_steps=3"),
    "step": ("model.kwargs.kind=step",),
    "epoch": ("model.kwargs.kind=epoch",),
    "own_step": ("model.kwargs.kind=own_step",),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_of_a_step_is_its_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = "+callbacks.rates={target:lightning.pytorch.callbacks:LearningRateMonitor,kwargs:{}}"
    watch = "+callbacks.watch={target:test_logged_rates:Watch,kwargs:{}}"
    run_here(monkeypatch, tmp_path / "run", *KINDS[kind], watch, *([monitor] if kind == "step" else []),
             "logger=csv", base=RUN)  # fmt: skip
    used = USED[-7:]  # what is before them are steps of a profile
    assert len(set(used)) > 2
    assert logged(tmp_path / "run") == pytest.approx(used, rel=1e-6)
    assert pytest.approx(used, rel=1e-6) == SEEN
    if kind == "step":
        assert logged(tmp_path / "run", "lr-Notes") == pytest.approx(used, rel=1e-6)


def test_it_stays_so_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*KINDS["warmup"], "logger=tensorboard", "lr_scheduler.total_steps=7")
    run_here(monkeypatch, tmp_path / "run", *words, "trainer.max_steps=4", base=RUN)
    used = USED[-4:]
    run_here(monkeypatch, tmp_path / "run", *words, "resume=auto", base=RUN)
    used += USED[-3:]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("lr")}
    assert list(found) == [1, 2, 3, 4, 5, 6, 7]
    assert list(found.values()) == pytest.approx(used, rel=1e-6)
