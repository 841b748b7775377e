"""A run that fails says where, keeps what it has, and leaves no process behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import thread_runs
from user_project import make_directory, record, train

PIPELINE = ("parallelism.pipeline=2", "schedule.microbatches=4", "partition=uniform")
LATE = "trainer.max_steps=20"  # the layer breaks in its 79th forward, which is the third of step 20


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("loss.target=user_code:per_sample",), "loss.target = shape (2,): must return a scalar mean over its samples"),
        (("model.target=user_code:no_such",), "model.target = user_code:no_such: must name a function of that module"),
        (("model.target=theirs:model",), "Importing theirs raised ModuleNotFoundError"),
        (("parallelism.pipeline=8",), "parallelism.pipeline = 8: the schedule makes 8 stages, the model has 7 layers"),
        (("model.target=user_code:breaking", "model.kwargs.what=none", "model.kwargs.calls=0"),
         "layer 1 (Breaks): must return tensors, not a NoneType"),
        (("model.target=user_code:breaking", "model.kwargs.what=short", "model.kwargs.calls=0"),
         "layer 3 (Linear) must take what comes before it. Given (2, 7) float32, it raised RuntimeError"),
    ],
)  # fmt: skip
def test_wrong_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    status, told = thread_runs.told("train", *thread_runs.WORDS, *PIPELINE, *overrides)
    assert status == 2
    assert said in told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_a_layer_that_fails_is_shown_in_the_schedule(tmp_path: Path) -> None:
    done = train(make_directory(tmp_path), *PIPELINE, "model.target=mine:breaking", "model.kwargs.what=raises", LATE)
    assert done.returncode == 1
    assert "rank 0 (stage 0, layers 0..1) failed in 0F2: ValueError: the layer is broken (mine.py:" in done.stderr
    assert "its buffers: input: (2, 6) float32" in done.stderr
    assert "^ here: 0F2 (rank 0, cell 3)" in done.stderr
    made = record(tmp_path / "run")
    assert made["status"] == "failed"
    assert "the layer is broken" in made["reason"]
    assert made["steps"] == len(made["loss"]) == 19


@pytest.mark.costly
def test_a_loss_that_is_not_finite_ends_the_run_and_the_losses_before_it_stay(tmp_path: Path) -> None:
    broken = ("model.target=mine:breaking", "model.kwargs.what=infinite", LATE)
    done = train(make_directory(tmp_path), *PIPELINE, *broken)
    assert done.returncode == 1
    where = "first not finite: the output of layer 1 on stage 0, micro-batch 0"
    assert f"step 20: the loss is nan; {where}; the weights are those of the step before" in done.stderr
    made = record(tmp_path / "run")
    assert (made["status"], made["steps"]) == ("failed", 19)
    assert len(made["loss"]) == 19


@pytest.mark.costly
def test_a_dataset_that_raises(tmp_path: Path) -> None:
    done = train(make_directory(tmp_path), *PIPELINE, "data.target=mine:Raising", "trainer.max_steps=8")
    assert done.returncode == 1
    assert "ValueError: sample 33 is broken (mine.py:" in done.stderr
    made = record(tmp_path / "run")
    assert (made["status"], made["steps"]) == ("failed", 4)
