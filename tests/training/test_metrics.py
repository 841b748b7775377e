"""metrics.NAME=package.module:function: the same figures in every layout, in every place where a run tells them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import user_code
import user_lightning
import user_metrics
from covering import sampled
from user_project import make_directory, record, result, train

from runner.training.validation import LoggedFigures, ValidationSums

METRICS = ("metrics.accuracy=figures:accuracy", "metrics.error=figures:error", "metrics.recall=figures:recall")
LAYOUTS = {
    "single": (),
    "pipeline": ("parallelism.pipeline=2",),
    "data": ("parallelism.data=2",),
    "both": ("parallelism.pipeline=2", "parallelism.data=2"),
    "gpipe_of_3": ("parallelism.pipeline=3", "schedule=gpipe"),
    "both_ways": ("parallelism.pipeline=2", "schedule=dualpipe"),
    "interleaved": ("parallelism.pipeline=2", "schedule=interleaved_1f1b"),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = make_directory(tmp_path)
    for name, module in (("figures", user_metrics), ("own", user_lightning)):
        (made / f"{name}.py").write_text(Path(str(module.__file__)).read_text(encoding="utf-8"), encoding="utf-8")
    return made


def test_what_a_validation_step_logs_is_weighed_by_the_samples_of_its_batch() -> None:
    shown: dict[str, float] = {}
    alone: Any = SimpleNamespace(replica=0, all_gather_objects=lambda value: [value])
    logged = LoggedFigures(lambda name, value, **_: shown.update({name: value}))
    for samples, value in ((6, 1.0), (2, 5.0)):
        logged.log(samples, "val_error", torch.tensor(value), prog_bar=True)
    logged.log(6, "val_given", 1.0, batch_size=1)
    logged.log(2, "val_given", 5.0, batch_size=1)
    assert logged.means(alone) == {"val_error": 2.0, "val_given": 3.0} == shown


def test_a_validation_weighs_each_replica_by_its_samples() -> None:
    """Six samples with a mean of 1 on one replica, two with a mean of 5 on the other: 2 over all eight."""
    told: list[Any] = []

    def gathered(value: Any) -> list[Any]:
        told.append(value)
        return told

    for replica, total, samples, mean in ((1, 10.0, 2, 5.0), (0, 6.0, 6, 2.0)):
        sums, ranks = ValidationSums(), SimpleNamespace(replica=replica, all_gather_objects=gathered)
        sums.add("loss", total, samples)
        assert sums.means(ranks) == {"loss": mean}  # type: ignore[arg-type]  # all that it asks of a strategy


def expected(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of the whole validation set at once, in plain PyTorch."""
    model = user_code.model()
    model.load_state_dict(weights)
    inputs, targets = user_code.points()[1].tensors
    with torch.no_grad():
        output = model.eval()(inputs)
    hits = output.argmax(-1) == targets
    of_class = targets == 2
    return {
        "val_accuracy": float(hits.double().mean()),
        "val_error": float((~hits).double().mean()),
        "val_recall": float(hits[of_class].double().mean()),
        "val_loss": float(torch.nn.functional.cross_entropy(output.double(), targets)),
    }


@pytest.mark.costly
@pytest.mark.parametrize("layout", sampled(LAYOUTS, *list(LAYOUTS)[::2]))
def test_every_layout_gives_what_one_process_gives(directory: Path, layout: str) -> None:
    """Also where the last micro-batch is small, and where a replica gets no sample of the last batch."""
    words = (*LAYOUTS[layout], "schedule.microbatches=4", "data.batch_size=9", "logger=csv", "trainer.val_every=2")
    made, weights = result(directory, *METRICS, *words)
    for name, value in expected(weights).items():
        steps, values = zip(*made[name], strict=True)
        assert steps == (2, 4)
        assert values[-1] == pytest.approx(value, abs=1e-6)
    with (directory / "run" / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    for name in ("val_loss", "val_accuracy", "val_recall"):
        assert [float(row[name]) for row in rows] == pytest.approx([value for _, value in made[name]], abs=1e-6)


@pytest.mark.costly
def test_they_are_told_while_it_runs_and_at_the_end(directory: Path) -> None:
    done = train(directory, *METRICS, "trainer.val_every=2")
    made = record(directory / "run")
    for step, value in made["val_accuracy"]:
        line = next(line for line in done.stderr.splitlines() if line.startswith(f"step {step}  val_loss"))
        assert f"val_accuracy {value:.4f}" in line
    _, best = min((loss, step) for step, loss in made["val_loss"])
    assert f"val_accuracy {dict(made['val_accuracy'])[best]:.4f}" in done.stdout


@pytest.mark.costly
def test_a_resumed_run_keeps_those_of_before(directory: Path) -> None:
    whole, _ = result(directory, *METRICS, "trainer.val_every=1", run="whole")
    result(directory, *METRICS, "trainer.val_every=1", "trainer.max_steps=2")
    again, _ = result(directory, *METRICS, "trainer.val_every=1", "resume=auto", "parallelism.pipeline=2")
    assert [step for step, _ in again["val_accuracy"]] == [1, 2, 3, 4]
    assert {name: again[name] for name in again if name.startswith("val_")} == {
        name: whole[name] for name in whole if name.startswith("val_")
    }


@pytest.mark.costly
@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("raising", "must run on the model's output and the target. IndexError"),
        ("per_sample", "It returned a tensor of shape (5,)"),
        ("undefined", "It returned nan for 5 samples"),
        ("text", "It returned a str"),
        ("negative", "It returned (1.0, -2.0)"),
    ],
)
def test_a_wrong_function_is_one_line_before_a_run_exists(directory: Path, function: str, told: str) -> None:
    words = ("schedule.microbatches=2", "data.batch_size=10", "parallelism.pipeline=2")
    done = train(directory, f"metrics.wrong=figures:{function}", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"metrics.wrong = figures:{function}: must")
    assert told in line
    assert not (directory / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("metrics.loss=figures:accuracy", "metrics.loss = figures:accuracy: must have another name."),
        ("metrics.a=figures.accuracy", "metrics.a = figures.accuracy: must be package.module:function."),
        ("metrics.top1=figures:acuracy", "Try metrics.top1=figures:accuracy."),
        ("metrics=figures:accuracy", "metrics = figures:accuracy: must be a mapping of names to values."),
    ],
)
def test_a_wrong_request_writes_nothing(directory: Path, words: str, told: str) -> None:
    done = train(directory, words)
    assert done.returncode == 2
    assert told in done.stderr
    assert not (directory / "run").exists()


def test_without_a_validation_set_they_are_refused(directory: Path) -> None:
    (directory / "sets.py").write_text("import mine\n\n\ndef train():\n    return mine.points()[0]\n")
    done = train(directory, *METRICS, "data.target=sets:train")
    assert done.returncode == 2
    assert "metrics = accuracy,error,recall: need a validation set. sets:train returns no" in done.stderr


def own(directory: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    """A LightningModule with its own steps, of which some log: record, rows of the validations, and what was said."""
    words = ("model.target=own:Whole", "loss=auto", "optimizer=auto", "logger=csv", "data.batch_size=9", *words)
    done = train(directory, *words)
    assert done.returncode == 0, done.stderr
    with (directory / "run" / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    return record(directory / "run"), rows, done.stderr


@pytest.mark.costly
def test_what_two_replicas_of_a_module_log_is_the_whole_runs(directory: Path) -> None:
    """The second replica has no sample of the set's last batch, and so logs nothing there."""
    alone, rows, _ = own(directory, *METRICS, "run_dir=run")
    (directory / "run").rename(directory / "alone")
    both, rows_of_both, _ = own(directory, *METRICS, "parallelism.data=2")
    for name in ("val_loss", "val_accuracy", "val_error", "val_recall"):
        assert math.isclose(both[name][-1][1], alone[name][-1][1], rel_tol=0, abs_tol=1e-6)
    for name in ("val_loss", "accuracy", "val_accuracy"):
        assert float(rows_of_both[-1][name]) == pytest.approx(float(rows[-1][name]), abs=1e-6)
    assert float(rows[-1]["accuracy"]) == pytest.approx(alone["val_accuracy"][-1][1], abs=1e-6)


@pytest.mark.costly
def test_a_pipeline_names_what_a_module_would_have_logged(directory: Path) -> None:
    alone, _, silent = own(directory, *METRICS)
    assert "is not called" not in silent
    (directory / "run").rename(directory / "alone")
    made, _, told = own(directory, *METRICS, "parallelism.pipeline=2")
    before = told[: told.index("step 1/")]
    assert "Whole.training_step is not called here, so that nothing is logged as own_loss" in before
    assert "Whole.validation_step is not called here, so that nothing is logged as accuracy" in before
    assert "Whole" not in told[told.index("step 1/") :]
    for name in ("val_loss", "val_accuracy", "val_recall"):
        assert made[name][-1][1] == pytest.approx(alone[name][-1][1], abs=1e-6)


def test_a_figure_that_the_module_logs_itself_cannot_be_asked_for_again(directory: Path) -> None:
    (directory / "logs.py").write_text(
        "import own\n\n\nclass Logs(own.Whole):\n"
        "    def validation_step(self, batch, batch_idx):\n        self.shared(batch)\n\n"
        "    def shared(self, batch):\n        self.log('val_accuracy', 1.0)\n"
    )
    done = train(directory, METRICS[0], "model.target=logs:Logs", "loss=auto", "optimizer=auto")
    assert done.returncode == 2
    told = "metrics.accuracy = figures:accuracy: must have another name. Logs.validation_step logs val_accuracy itself."
    assert told in done.stderr
