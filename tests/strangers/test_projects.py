"""Small projects as their authors write them train in one and in two stages as a plain loop over whole batches does."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from requests_in_threads import batches, trained
from torch import nn

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
CASES = [*PROJECTS, *VARIED]


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


@pytest.mark.costly
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


def by_microbatches(
    words: list[str], model: nn.Module, forward: Any, loss: Any, optimizer: torch.optim.Optimizer, count: int
) -> list[float]:
    """A plain loop in which batch norms see one micro-batch at a time, in their order, as accumulation has it."""
    losses = []
    for inputs, targets in batches(words, STEPS):
        optimizer.zero_grad()
        parts = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        total = sum((loss(forward(x), y) * len(y) for x, y in parts), start=torch.zeros(()))
        (total / len(targets)).backward()
        optimizer.step()
        losses.append(total.item() / len(targets))
    return losses


@pytest.mark.costly
@pytest.mark.parametrize("pipeline", [1, 2])
def test_batch_norms_of_a_unet(pipeline: int) -> None:
    """Statistics are those of micro-batches, and running averages follow them in their order."""
    module: Any = importlib.import_module("unet")
    words = [f"{key}.target=unet:{name}" for key, name in (("model", "build"), ("data", "data"), ("loss", "loss"))]
    words += [f"seed={SEED}", f"data.batch_size={BATCH}", "model.kwargs.norm=batch"]
    torch.manual_seed(SEED)
    model = module.build(norm="batch")
    expected = by_microbatches(words, model, model, module.loss, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    losses, state = trained(words, pipeline=pipeline, microbatches=2, steps=STEPS)
    assert losses == pytest.approx(expected, rel=2e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize(("pipeline", "count"), [(1, 1), (1, 2), (2, 2)])
def test_a_module_with_metrics_and_batch_norms(pipeline: int, count: int) -> None:
    """A LightningModule of a template: its own step on one rank, its layers and its loss in a pipeline."""
    pytest.importorskip("torchmetrics")
    module: Any = importlib.import_module("hydra_template")
    words = ["model.target=hydra_template:build", "data.target=hydra_template:data", f"data.batch_size={BATCH}"]
    words += [f"seed={SEED}", f"model.kwargs.stages={str(pipeline > 1).lower()}"]
    torch.manual_seed(SEED)
    model = module.build(stages=pipeline > 1)
    adam = partial(torch.optim.Adam, lr=0.01)
    optimizer = adam(model.net.parameters())
    expected = by_microbatches(words, model, model.net, nn.functional.cross_entropy, optimizer, count)
    losses, state = trained(words, pipeline=pipeline, microbatches=count, steps=STEPS, optimizer=adam)
    assert losses == pytest.approx(expected, rel=2e-6)
    own = {name: value for name, value in model.state_dict().items() if name.startswith("net.")}
    for name, value in own.items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6, msg=name)
