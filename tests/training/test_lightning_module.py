"""A LightningModule as model.target: its own step, optimizer and hooks, equal to a plain loop and a plain Trainer."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import traced_script
import user_code
import user_lightning
import warm
from narrow import present
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import multiclass_f1_score
from user_project import assert_same_weights, environment, record

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.launch.run.prepare import prepare, write_request
from runner.training.run import run_rank

NAMES = ("own_loss", "val_loss", "accuracy")
STEPS, SAMPLES = 7, 21  # three steps an epoch, of 8, 8 and 5 samples
BASE = (
    "model.target=user_lightning:Whole", "data.target=user_code:points", f"data.kwargs.samples={SAMPLES}",
    "data.batch_size=8", "data.shuffle=false", f"trainer.max_steps={STEPS}", "device=cpu", "trainer.progress=false",
)  # fmt: skip


def run(run_dir: Path, *overrides: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """In this process, as its one rank: the record and the weights."""
    quiet = () if any(word.startswith("logger=") for word in overrides) else ("logger=none",)
    config = resolve([*BASE, *quiet, *overrides, f"run_dir={run_dir}"])
    plan = prepare(config)
    run_dir.mkdir(exist_ok=True)
    write_request(config, plan, run_dir, command="")
    run_rank(config, run_dir)
    return record(run_dir), load_file(run_dir / "weights.safetensors")


def batches(replicas: int = 1) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    inputs, targets = user_code.points(SAMPLES)[0].tensors
    parts = [(inputs[at : at + 8], targets[at : at + 8]) for at in range(0, SAMPLES, 8)]
    parts = (parts * STEPS)[:STEPS]
    return [list(zip(*(t.tensor_split(replicas) for t in part), strict=True)) for part in parts]


def plain_loop(count: int, replicas: int = 1, *, epochs: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Sums over micro-batches, replica by replica, divided once; its optimizer and scheduler by hand."""
    torch.manual_seed(0)
    model = user_lightning.Whole(epochs=epochs)
    made = model.configure_optimizers()
    optimizer, rates = made["optimizer"], made["lr_scheduler"]
    assert isinstance(rates, dict)
    scheduler = rates["scheduler"]
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    for number, step in enumerate(batches(replicas), 1):
        total, gradients = 0.0, []
        for x, y in step:
            model.zero_grad()
            part = 0.0
            for xs, ys in zip(x.clone().tensor_split(count), y.clone().tensor_split(count), strict=True):
                if len(xs):
                    loss = torch.nn.functional.cross_entropy(model.net(xs), ys) * len(xs)
                    loss.backward()  # type: ignore[no-untyped-call]  # the library's
                    part += float(loss.detach().double())
            total += part
            gradients.append([p.grad for p in trained])
        samples = sum(len(x) for x, _ in step)
        for parameter, *parts in zip(trained, *gradients, strict=True):
            parameter.grad = sum(parts[1:], parts[0]) / samples
        optimizer.step()
        if not epochs or number % 3 == 0:
            scheduler.step()
        losses.append(total / samples)
    return losses, model.state_dict()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.costly
@pytest.mark.parametrize(("count", "epochs"), [(1, True), (3, False)])
def test_its_own_step_and_optimizer_are_the_plain_loops(tmp_path: Path, count: int, epochs: bool) -> None:
    overrides = (f"schedule.microbatches={count}", f"model.kwargs.epochs={str(epochs).lower()}")
    made, weights = run(tmp_path / "run", *overrides)
    losses, state = plain_loop(count, epochs=epochs)
    assert made["loss"] == losses
    assert_same_weights(weights, state)


@pytest.mark.costly
def test_it_is_what_a_plain_trainer_makes_of_it(tmp_path: Path) -> None:
    """Losses, weights, validation and metrics to rounding: Lightning divides before the backward."""
    torch.manual_seed(0)
    model = user_lightning.Whole()
    training, validation = user_code.points(SAMPLES)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=STEPS, logger=pl.loggers.CSVLogger(tmp_path, "", "plain"), log_every_n_steps=1,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(training, 8), DataLoader(validation, 8))
    made, weights = run(tmp_path / "run", "logger=csv", "trainer.val_every=3")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-7)
    found, expected = (
        {(row["step"], key): float(row[key]) for row in csv.DictReader(file.open()) for key in NAMES if row.get(key)}
        for file in (next((tmp_path / "run" / "csv").rglob("metrics.csv")), tmp_path / "plain" / "metrics.csv")
    )
    assert {key[1] for key in expected} == set(NAMES)
    for key, value in expected.items():
        counted_from_one = (str(int(key[0]) + 1), key[1])
        assert found[counted_from_one] == pytest.approx(value, rel=1e-5), key
    assert made["val_loss"][0] == [3, pytest.approx(expected["2", "val_loss"], rel=1e-6)]


@pytest.mark.costly
def test_hooks_are_called_and_micro_batches_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[user_lightning.Whole] = []

    def on_fit_end(module: user_lightning.Whole) -> None:
        kept.append(module)

    monkeypatch.setattr(user_lightning.Whole, "on_fit_end", on_fit_end, raising=False)
    run(tmp_path / "run", "schedule.microbatches=2", "trainer.max_steps=4")
    called = [each for each in kept[0].called if each is not None]
    assert called[-12:] == [0, 1, "end", 2, 3, "end", 4, 5, "end", 0, 1, "end"], "as with accumulate_grad_batches=2"


@pytest.mark.costly
def test_a_resumed_run_is_the_whole_one(tmp_path: Path) -> None:
    """Its scheduler, its groups' rates and dropout too."""
    overrides = ("schedule.microbatches=2", "model.kwargs.dropout=0.5", "checkpoint.every=4", "checkpoint.keep=9")
    whole, weights = run(tmp_path / "whole", *overrides)
    (cut,) = (path for path in (tmp_path / "whole" / "checkpoints").iterdir() if path.stem.endswith("4"))
    copied = shutil.copy(cut, tmp_path / "cut.ckpt")
    rest, again = run(tmp_path / "rest", *overrides, f"resume={copied}")
    assert rest["loss"][-3:] == whole["loss"][-3:]
    assert_same_weights(again, weights)


@pytest.mark.costly
def test_bf16_autocast_reaches_its_step(tmp_path: Path) -> None:
    made, _ = run(tmp_path / "run", "precision=bf16_mixed", "trainer.max_steps=2")
    plain, _ = run(tmp_path / "plain", "trainer.max_steps=2")
    assert made["loss"] != plain["loss"]
    assert made["loss"] == pytest.approx(plain["loss"], rel=2e-2)


@pytest.mark.costly
def test_its_optimizers_states_are_in_the_prediction(tmp_path: Path) -> None:
    momentum = prepare(resolve([*BASE, f"run_dir={tmp_path / 'a'}"])).to_json()["parts"][0]
    none = prepare(resolve([*BASE, "model.target=user_lightning:Bare", f"run_dir={tmp_path / 'b'}"])).to_json()
    assert momentum["optimizer"] == momentum["gradients"]
    assert none["parts"][0]["optimizer"] == 0


REFUSED = [
    ("model.target=user_lightning:Manual", "must leave the optimization to Lightning. Manual.automatic_optimization"),
    ("model.target=user_lightning:Clips", "must not define Clips.configure_gradient_clipping, which is not called"),
    ("model.target=user_lightning:ReturnsNothing", "ReturnsNothing: must return its loss from training_step"),
    ("model.target=user_lightning:TwoOptimizers", "must return one optimizer from configure_optimizers. It returned 2"),
    ("model.target=user_lightning:LineSearch", "must have an optimizer without a closure. LBFGS computes the loss"),
    ("loss=mse", "loss = mse: must be left out. Whole has its own, which it would replace. Try loss=auto."),
    ("optimizer=sgd", "optimizer = sgd: must be left out. configure_optimizers of the LightningModule decides."),
    ("optimizer.lr=0.1", "optimizer.lr = 0.1: must be left out."),
    ("lr_scheduler=cosine", "lr_scheduler = cosine: must be left out."),
    ("precision=bf16_master", "precision = bf16_master: needs an optimizer of the request."),
    ("activation_checkpoint=full", "activation_checkpoint = full: must be none without a pipeline."),
    ("compile=true", "compile = true: must be false without a pipeline."),
    (
        "model.target=user_lightning:ReturnsNothing parallelism.pipeline=2",
        "ReturnsNothing: must return its loss from training_step",
    ),
]


@pytest.mark.costly
@pytest.mark.parametrize(("overrides", "told"), REFUSED)
def test_what_it_cannot_have_is_refused(
    overrides: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    assert main(["plan", *BASE]) == 0, "a profile in the cache must not hide what is wrong"
    assert main(["train", *BASE, *overrides.split()]) == 2
    assert told in capsys.readouterr().err
    assert list(place.iterdir()) == []


@pytest.mark.costly
@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_two_ranks_are_the_plain_loop_too(tmp_path: Path, layout: str) -> None:
    """Replicas by its training step, a pipeline by its layers and loss; its optimizer in both."""
    for source in (user_lightning, user_code):
        shutil.copy(present(source.__file__), tmp_path)
    options = (f"parallelism.{layout}=2", "schedule.microbatches=3", "partition=uniform", "logger=none", "run_dir=run")
    command = [sys.executable, "-m", "runner", "train", *BASE, *options]
    done = warm.run(command, cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    losses, state = plain_loop(3, replicas=2 if layout == "data" else 1)
    made = record(tmp_path / "run")
    assert made["loss"] == losses
    found = load_file(tmp_path / "run" / "weights.safetensors")
    assert_same_weights(found, {name: value for name, value in state.items() if name in found})
    assert set(state) - set(found) <= {"unused"}, "what no layer has is not trained in a pipeline"
    model = user_lightning.Whole()
    model.load_state_dict(found, strict=False)
    inputs, targets = user_code.points(SAMPLES)[1].tensors
    assert made["val_loss"] == [[STEPS, pytest.approx(model.loss(model.net(inputs), targets).item(), rel=1e-6)]]


@pytest.mark.costly
def test_what_its_traced_steps_log_reaches_loggers_and_record(tmp_path: Path) -> None:
    shutil.copy(present(traced_script.__file__), tmp_path)
    options = (
        "model.target=traced_script:Stepwise", "data.target=traced_script:sets", "data.batch_size=8", "device=cpu",
        "parallelism.pipeline=2", "schedule.microbatches=2", "partition=uniform", "trainer.max_steps=4",
        "trainer.progress=false", "data.shuffle=false", "logger=csv", "run_dir=run",
    )  # fmt: skip
    command = [sys.executable, "-m", "runner", "train", *options]
    done = warm.run(command, cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Stepwise.training_step is traced, so that these are not logged: weight; metrics.NAME=" in done.stderr
    model = traced_script.Stepwise().eval()
    model.load_state_dict(load_file(tmp_path / "run" / "weights.safetensors"))
    inputs, targets = traced_script.samples().tensors
    top = model.body(inputs).topk(2).indices == targets[:, None]
    f1 = multiclass_f1_score(model.body(inputs), targets, num_classes=3, average="macro").item()
    wanted = {"val_accuracy": top[:, 0].float().mean().item(), "valid/top2": top.any(-1).float().mean().item()}
    made = record(tmp_path / "run")
    assert made["val_f1"][-1] == [4, pytest.approx(f1, abs=1e-6)]
    assert made["val_accuracy"][-1] == [4, pytest.approx(wanted["val_accuracy"], abs=1e-6)]
    assert made["val_valid/top2"][-1] == [4, pytest.approx(wanted["valid/top2"], abs=1e-6)]
    with next((tmp_path / "run").rglob("metrics.csv")).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["own"]) for row in rows if row["own"]] == pytest.approx(made["loss"], rel=1e-6)
    last = {name: [float(row[name]) for row in rows if row[name]][-1] for name in wanted}
    assert last == pytest.approx(wanted, abs=1e-6)
