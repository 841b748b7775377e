"""Small projects as their authors write them train in one and in two stages as a plain loop over whole batches does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from requests_in_threads import trained

STEPS, BATCH = 3, 8
SEED = 7

# model.kwargs and data.kwargs, by the project and what is varied.
PROJECTS: dict[str, tuple[str, list[str]]] = {
    "nano": ("nano", []),
    "lit": ("lit", []),
    "unet": ("unet", []),
    "speech": ("speech", []),
}
VARIED: dict[str, tuple[str, list[str]]] = {
    "nano of one layer": ("nano", ["model.kwargs.n_layer=1"]),
    "lit with short rows": ("lit", ["data.kwargs.length=5", "model.kwargs.max_seq_length=5"]),
    "unet bilinear": ("unet", ["model.kwargs.bilinear=true", "data.kwargs.height=13"]),
    "speech of one token": ("speech", ["data.kwargs.length=1", "model.kwargs.sparse=false"]),
}
CASES = [*PROJECTS, *(pytest.param(name, marks=pytest.mark.slow) for name in VARIED)]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "projects"))


def kwargs_of(words: list[str], section: str) -> dict[str, Any]:
    pairs = [word.removeprefix(f"{section}.kwargs.").split("=") for word in words if word.startswith(section)]
    return {key: {"true": True, "false": False}.get(value) if value in ("true", "false") else _plain(value)
            for key, value in pairs}  # fmt: skip


def _plain(value: str) -> Any:
    return int(value) if value.isdigit() else value


def plain(project: str, words: list[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Whole batches, one process, the project's own functions, torch's SGD."""
    module: Any = importlib.import_module(project)
    torch.manual_seed(SEED)
    model = module.build(**kwargs_of(words, "model"))
    data = module.data(**kwargs_of(words, "data"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        samples = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
        inputs, targets = torch.utils.data.default_collate(samples)
        named = inputs if isinstance(inputs, dict) else {}
        output = model(**named) if named else model(*inputs if isinstance(inputs, list | tuple) else (inputs,))
        loss = module.loss(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_project_trains_as_its_own_loop(case: str, pipeline: int, tmp_path: Path) -> None:
    """Losses and weights are equal to rounding, with four micro-batches."""
    project, words = (PROJECTS | VARIED)[case]
    words = [*words, *([f"data.kwargs.folder={tmp_path}"] if project == "nano" else [])]
    asked = [f"{key}.target={project}:{name}" for key, name in (("model", "build"), ("data", "data"), ("loss", "loss"))]
    asked += [f"seed={SEED}", f"data.batch_size={BATCH}", *words]
    losses, state = trained(asked, pipeline=pipeline, microbatches=4, steps=STEPS)
    expected, weights = plain(project, words)
    assert losses == pytest.approx(expected, rel=2e-6)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6, msg=name)
