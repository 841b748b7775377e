"""Planners whose stages differ in ranks, or micro-batches in size: what they print trains as one process does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_runs import peaks, train

from runner.cli.main import main
from runner.config.compose.resolve import resolve

_WORDS = (
    "model=custom", "model.target=test_uneven_layouts:build", "data=custom", "data.target=test_uneven_layouts:data",
    "loss=mse", "data.batch_size=16", "data.shuffle=false", "optimizer=sgd", "optimizer.lr=0.05",
    "optimizer.momentum=0.9", "device=cpu", "hardware=laptop_cpu", "hardware.link_latency_seconds=0.0",
    "logger=none", "trainer.progress=false", "launcher.watchdog_seconds=null", "trainer.max_steps=3", "seed=3",
)  # fmt: skip


def build() -> nn.Sequential:
    """Two layers of which the first, a small matrix, takes twice as long, and the second has many weights."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    return nn.Sequential(first, nn.Sequential(nn.Flatten(), nn.Linear(64 * 32, 32)))


def data() -> list[tuple[Tensor, Tensor]]:
    """Samples of random numbers."""
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(64, 32, generator=made), torch.randn(32, generator=made)) for _ in range(48)]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own; the model is profiled in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runner.profiling.model.apart", lambda function, *given: function(*given))
    return tmp_path


def planned(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """The document of ``runner plan --json``."""
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a plain loop over whole batches."""
    model, samples, losses = build(), data(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        inputs, targets = (torch.stack([samples[step * 16 + at][part] for at in range(16)]) for part in (0, 1))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


@pytest.mark.costly
@pytest.mark.parametrize("planner", ["pipedream", "pipe_torch", "efftra", "piper", "alpa", "dapple"])
def test_stages_with_numbers_of_ranks_of_their_own(
    planner: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (*_WORDS, "parallelism=auto", "parallelism.ranks=3", f"planner={planner}")
    found = planned(asked, capsys)
    assert "schedule.replicas=[2,1]" in found["request"]
    trains_as_planned(found, place, capsys)


@pytest.mark.costly
def test_the_first_microbatch_in_halves(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas would have to sum many weights over a slow link, so that two stages are faster."""
    slow = ("hardware.link_bytes_per_second=1e7", "planner=autopipe")
    found = planned((*_WORDS, "parallelism=auto", "parallelism.ranks=2", *slow), capsys)
    assert {"schedule.microbatches=9", "schedule.shares=[1,1,2,2,2,2,2,2,2]"} <= {*found["request"]}
    trains_as_planned(found, place, capsys)


def trains_as_planned(found: Any, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was found can be typed, keeps to its bytes, and trains as whole batches do."""
    typed = planned(found["request"], capsys)
    for key in ("step_seconds", "peak_memory_bytes", "partition", "fits"):
        assert typed[key] == found[key], key
    (place / "run").mkdir()
    run = train(resolve(found["request"]), place / "run")
    assert [predicted for _, predicted in peaks(run)] == found["peak_memory_bytes"]
    assert all(counted <= predicted for counted, predicted in peaks(run))
    losses, weights = alone()
    torch.testing.assert_close(run.losses, losses, rtol=1e-6, atol=1e-6)
    for name, copies in run.weights.items():
        for copy in copies:
            torch.testing.assert_close(copy, weights[name], rtol=0, atol=1e-6)
