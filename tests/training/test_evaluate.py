"""runner evaluate and runner predict: a run's own figures and outputs, from its files, in any layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import user_code
import user_lightning
import user_metrics
import warm
from safetensors.torch import load_file
from thread_runs import told
from user_project import environment, make_directory, record, train

from runner.errors import RequestError
from runner.launch.evaluate import evaluate, find_weights

SETS = """
from torch.utils.data import TensorDataset, Subset

import mine


def three():
    train, validation = mine.points(24, 33)
    return train, Subset(validation, range(10)), Subset(validation, range(10, 33))


def module():
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    class Points(LightningDataModule):
        def setup(self, stage):
            self.train, self.validation, test = three()
            if stage == "test":
                self.test = test

        def train_dataloader(self):
            return DataLoader(self.train)

        def val_dataloader(self):
            return DataLoader(self.validation)

        def test_dataloader(self):
            return DataLoader(self.test)

    return Points()
"""
RUN = (
    "data.target=sets:three", "metrics.accuracy=figures:accuracy", "metrics.recall=figures:recall",
    "trainer.val_every=2", "schedule.microbatches=4",
)  # fmt: skip
LAYOUTS = {
    "single": ("parallelism=single",),
    "both": ("parallelism.pipeline=2", "parallelism.data=2"),
}
INTERLEAVED = ("schedule=interleaved_1f1b", "schedule.microbatches=4")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return _made(tmp_path)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run."""
    made = _made(tmp_path_factory.mktemp("trained"))
    trained(made)
    return made


def _made(place: Path) -> Path:
    made = make_directory(place)
    for name, module in (("figures", user_metrics), ("own", user_lightning)):
        (made / f"{name}.py").write_text(Path(str(module.__file__)).read_text(encoding="utf-8"), encoding="utf-8")
    (made / "sets.py").write_text(SETS, encoding="utf-8")
    return made


def command(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "runner", *words], cwd=directory, env=environment(directory))


def trained(directory: Path, *words: str) -> dict[str, Any]:
    done = train(directory, *RUN, *words)
    assert done.returncode == 0, done.stderr
    return record(directory / "run")


def evaluated(directory: Path, *words: str) -> dict[str, Any]:
    done = command(directory, "evaluate", "run", "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found == json.loads((directory / found["file"]).read_text(encoding="utf-8"))
    return found


@pytest.mark.costly
def test_every_layout_finds_the_runs_own_last_validation(directory: Path) -> None:
    made = trained(directory, "parallelism.pipeline=2", "schedule=zb_h1")
    tests = {evaluated(directory, *words)["test_loss"] for words in LAYOUTS.values()}
    assert max(tests) - min(tests) < 1e-6
    for words in LAYOUTS.values():
        found = evaluated(directory, "--set", "validation", *words)
        for name in ("val_loss", "val_accuracy"):
            assert found[name] == pytest.approx(made[name][-1][1], abs=1e-6)
        assert found.keys().isdisjoint({"test_loss", "val_recall"})  # no sample of its class is in this set
    assert evaluated(directory)["val_loss"] == made["val_loss"][-1][1]


def plain(weights: dict[str, torch.Tensor], chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets of some validation samples, in plain PyTorch."""
    model = user_code.model()
    model.load_state_dict(weights)
    inputs, targets = user_code.points(24, 33)[1][chosen]
    with torch.no_grad():
        return model.eval()(inputs), targets


@pytest.mark.costly
def test_predictions_are_a_plain_forward_of_the_exported_weights(directory: Path) -> None:
    trained(directory, "parallelism.pipeline=2")
    done = command(directory, "export", "run", "model.safetensors")
    assert done.returncode == 0, done.stderr
    weights = load_file(directory / "model.safetensors")
    output, targets = plain(weights, slice(10, 33))
    done = command(directory, "predict", "run", "made.safetensors", *INTERLEAVED)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(load_file(directory / "made.safetensors")["predictions"], output, rtol=0, atol=1e-6)
    words = ("made.npy", "--set", "validation", "--weights", "model.safetensors", *INTERLEAVED)
    done = command(directory, "predict", "run", *words)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(directory / "made.npy"), plain(weights, slice(10))[0].numpy(), rtol=0, atol=1e-6)
    found = evaluated(directory, "--set", "test", "--weights", "model.safetensors", *INTERLEAVED)
    assert found["test_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(output, targets)), abs=1e-6)
    assert found["test_accuracy"] == pytest.approx(float((output.argmax(-1) == targets).double().mean()), abs=1e-6)


@pytest.mark.costly
def test_the_best_checkpoint_is_taken_and_named_at_the_end(directory: Path) -> None:
    """A rate so high that the loss rises: the first checkpoint is the best."""
    words = ("optimizer.lr=3", "checkpoint=best", "checkpoint.every=2", "parallelism.data=2", *RUN)
    done = train(directory, *words)
    assert done.returncode == 0, done.stderr
    assert "best checkpoint  run/checkpoints/step-2.ckpt" in done.stdout
    values = dict(record(directory / "run")["val_loss"])
    assert values[2] < values[4]
    best, last = evaluated(directory, "--set", "validation"), evaluated(directory, "--last", "--out", "last.json")
    assert (best["which"], best["val_loss"]) == ("the best checkpoint", values[2])
    assert (last["which"], last["val_loss"]) == ("the newest checkpoint", values[4])
    assert evaluated(directory, "--best")["val_loss"] == values[2]


@pytest.mark.costly
def test_how_it_was_trained_does_not_matter(directory: Path) -> None:
    made = trained(directory, "checkpoint=asynchronous", "precision=bf16_master")
    assert evaluated(directory, "parallelism=single")["val_loss"] == pytest.approx(made["val_loss"][-1][1], abs=1e-6)


@pytest.mark.costly
def test_a_lightning_module_is_evaluated_by_its_own_steps_or_its_layers(directory: Path) -> None:
    made = trained(directory, "model.target=own:Whole", "loss=auto", "optimizer=auto", "data.target=sets:module")
    alone, pipeline = evaluated(directory), evaluated(directory, "parallelism.pipeline=2")
    for name in ("val_loss", "val_accuracy", "test_loss", "test_recall"):
        assert alone[name] == pytest.approx(pipeline[name], abs=1e-6)
    assert alone["val_loss"] == made["val_loss"][-1][1]
    outputs = []
    for words in ((), ("parallelism.pipeline=2",)):
        done = command(directory, "predict", "run", "made.npy", *words)
        assert done.returncode == 0, done.stderr
        outputs.append(np.load(directory / "made.npy"))
    assert [each.shape for each in outputs] == [(23, 5)] * 2
    for other in outputs[1:]:
        np.testing.assert_allclose(outputs[0], other, rtol=0, atol=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("evaluate",), "RUN_DIR = null: must be a run's directory, and overrides KEY=VALUE."),
        (("evaluate", "nowhere"), "RUN_DIR = nowhere: must be a run's directory. There is no such directory."),
        (
            ("evaluate", "run", "--set", "tests"),
            "--set = tests: must be one or several of validation, test, train. Try --set test.",
        ),
        (("predict", "run", "a.npy", "--set", "test,train"), "--set = test,train: must be one of validation, test,"),
        (("evaluate", "run", "--best"), "--best = run: needs a best checkpoint."),
        (("evaluate", "run", "--best", "--last"), "flag = --last: must stand alone."),
        (("evaluate", "run", "--weights", "none.ckpt"), "--weights = none.ckpt: must be a file."),
        (("evaluate", "run", "--weights", "mine.safetensors"), "--weights = "),
        (("evaluate", "run", "parallelism=singl"), "Try parallelism=single."),
        (("evaluate", "run", "recipe=rudalle_tiny"), "recipe = rudalle_tiny: must be left out."),
        (("evaluate", "run", "launcher=slurm"), "launcher = slurm: must be local."),
        (("predict", "run"), "must be a run's directory and the file to write"),
        (("predict", "run", "a.txt"), "FILE = a.txt: must end in .safetensors or .npy."),
        (("predict", "run", "no/a.npy"), "FILE = no/a.npy: must be a file in a folder that exists."),
        (
            ("predict", "run", "a.npy", "schedule=dualpipe", "parallelism.pipeline=2", "schedule.microbatches=4"),
            "one last",
        ),
        (
            ("evaluate", "run", "model.target=mine:Listed"),
            "run/checkpoints/step-4.ckpt: must hold the tensors of this model.",
        ),
        (("evaluate", "run", "data.target=mine:points", "--set", "test"), "mine:points returns no test set."),
        (("evaluate", "run", "metrics.wrong=figures:raising"), "metrics.wrong = figures:raising: must run on"),
    ],
)
def test_what_cannot_be_is_one_line(
    trained_once: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.chdir(trained_once)
    monkeypatch.syspath_prepend(trained_once)
    (trained_once / "mine.safetensors").write_text("none")
    status, said = told(*words)
    assert status == 2, said
    assert line in said
    assert "Traceback" not in said
    assert not (trained_once / "a.npy").exists()


def test_a_missing_set_is_told_before_the_model_is_profiled(
    trained_once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained_once)
    monkeypatch.syspath_prepend(trained_once)
    monkeypatch.setattr("runner.launch.run.measured_plan.measured_plan", None)
    with pytest.raises(RequestError, match="mine:points returns no test set"):
        evaluate(Path("run"), ["data.target=mine:points"], find_weights(Path("run")), sets=["test"])
