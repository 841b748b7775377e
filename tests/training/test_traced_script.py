"""The strategy as a switch: a module that lists no layers trains in a pipeline as it does in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import multiclass_f1_score
from traced_script import Ordinary, Stepwise, samples

from runner.api import PipelineStrategy
from runner.api.failures import tell_refusals
from runner.api.trace import traced_layers
from runner.errors import Problem, RequestError

HERE = Path(__file__).parent


def _trained(tmp_path: Path, module: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Weights and logged figures of a script's run, and what it said."""
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / "traced_script.py"), str(tmp_path / "weights.pt"), module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    weights, figures = torch.load(tmp_path / "weights.pt")
    return weights, figures, done.stderr


@pytest.mark.costly
def test_a_script_trains_as_one_process_does(tmp_path: Path) -> None:
    saved, _, said = _trained(tmp_path, "Ordinary")
    assert said.count("Ordinary.training_step is not called here, so that nothing is logged as own; loss, ") == 1
    model = Ordinary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in DataLoader(samples(), batch_size=8):
            optimizer.zero_grad()
            model.loss(model(x), y).backward()  # type: ignore[no-untyped-call]  # the library's
            optimizer.step()
    assert saved.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.costly
def test_what_the_steps_of_a_script_log_is_that_of_whole_batches(tmp_path: Path) -> None:
    saved, figures, said = _trained(tmp_path, "Stepwise")
    model, cross_entropy = Stepwise(), torch.nn.functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = hits = last = torch.tensor(0.0)
    f1 = partial(multiclass_f1_score, num_classes=3, average="macro")
    for _ in range(2):
        hits = torch.tensor(0.0)
        for x, y in DataLoader(samples(), batch_size=8):
            optimizer.zero_grad()
            scores = torch.cat([model.body(part) for part in x.chunk(2)])  # normalized by micro-batch
            own = cross_entropy(scores, y)
            own.backward()  # type: ignore[no-untyped-call]  # the library's
            optimizer.step()
            last = f1(scores, y)
            hits += (scores.argmax(-1) == y).sum()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)
    inputs, targets = samples().tensors
    scores = model.eval().body(inputs)
    top = scores.topk(2).indices == targets[:, None]
    wanted = {
        "own": own,
        "f1": last,
        "val_f1": f1(scores, targets),
        "accuracy": hits / len(inputs),
        "val_loss": cross_entropy(scores, targets),
        "val_accuracy": top[:, 0].float().mean(),
        "valid/top2": top.any(-1).float().mean(),
    }
    assert {*wanted} <= {*figures}
    for name, value in wanted.items():
        torch.testing.assert_close(figures[name].float(), value, rtol=1e-5, atol=1e-6)
    assert not {"weight", "inside"} & {*figures}
    assert said.count("Stepwise.training_step is traced, so that these are not logged: weight; ") == 1
    assert said.count("Stepwise.validation_step is traced, so that these are not logged: inside; ") == 1
    assert "sync_dist" not in said, "every rank has them already"


def test_a_module_names_an_example_itself() -> None:
    model = Ordinary()
    model.example_input_array = torch.randn(2, 6)
    state = torch.get_rng_state()
    layers = traced_layers(model, 3)
    assert len(layers) >= 3
    assert torch.equal(torch.get_rng_state(), state), "tracing draws nothing from the run's generator"


def test_what_a_module_lacks_is_named() -> None:
    model = Ordinary()
    no_data = SimpleNamespace(fit_loop=SimpleNamespace(_data_source=SimpleNamespace(is_defined=lambda: False)))
    model.__dict__["_trainer"] = cast(Any, no_data)
    with pytest.raises(RequestError, match=r"Ordinary.example_input_array = null: must be set here\."):
        traced_layers(model, 2)
    with pytest.raises(RequestError, match=r"LightningModule = null: must have a method layers\(\) or forward\(\)\."):
        traced_layers(pl.LightningModule(), 2)


def test_a_number_of_devices_that_makes_other_ranks_is_named() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=PipelineStrategy(stages=2, microbatches=2), logger=False
    )
    line = r"Trainer.devices = 1: must make 2 ranks on all nodes together\. There are 1,.* Try Trainer\(devices=2\)"
    with pytest.raises(RequestError, match=line):
        trainer.fit(Ordinary(), DataLoader(samples(), batch_size=4))


def test_a_refusal_names_the_arguments_of_the_strategy() -> None:
    with pytest.raises(RequestError, match=r"^microbatches = 5: must be a multiple .* Try microbatches=4\."):
        PipelineStrategy(stages=2, schedule="interleaved_1f1b", microbatches=5)
    strategy = PipelineStrategy(stages=1, boundaries=[99])
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(RequestError, match=r"^boundaries = \[99\]: 1 stages need 0 "):
        trainer.fit(Ordinary(), DataLoader(samples(), batch_size=4))


def test_a_refusal_is_told_without_frames(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    tell_refusals()
    tell_refusals()
    refused, other = RequestError([Problem("a", 1, "must be 2"), Problem("b", 3, "must be 4")]), KeyError("x")
    for error in (refused, other):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "a = 1: must be 2.\nb = 3: must be 4.\n"
    assert others == [other]
