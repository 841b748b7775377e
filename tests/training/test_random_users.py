"""Users' functions that draw random numbers and seed nothing: every layout draws the same, or the run ends and says so.

The reference is the same request in one process, with as many micro-batches. That it learns at all is checked apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import user_random
import warm
from safetensors.torch import load_file
from user_project import environment

REQUEST = (
    "model.target=mine:model", "data.target=mine:split", "loss.target=mine:mean", "device=cpu", "data.batch_size=16",
    "optimizer.lr=0.02", "logger=none", "trainer.max_steps=12",
)  # fmt: skip
ONE = ("parallelism.pipeline=1", "schedule.microbatches=4")
PIPELINE = ("parallelism.pipeline=2", "schedule.microbatches=4", "partition=uniform")
REPLICAS = ("parallelism.data=2", "schedule.microbatches=2")
SEED_IT = "draw from random, np.random or torch, which the runner seeds, or seed each generator of its own"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(Path(user_random.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def train(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", "train", *REQUEST, *overrides]
    return warm.run(command, cwd=directory, env=environment(directory))


def record(run_dir: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    return made


def result(directory: Path, run: str, *overrides: str) -> tuple[list[float], Any, dict[str, torch.Tensor]]:
    """Losses, validation losses and weights of a run that must end well."""
    done = train(directory, *overrides, f"run_dir={run}")
    assert done.returncode == 0, done.stderr
    made = record(directory / run)
    return made["loss"], made["val_loss"], load_file(directory / run / "weights.safetensors")


def assert_same(found: tuple[Any, Any, dict[str, torch.Tensor]], expected: tuple[Any, Any, Any]) -> None:
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert [name for name, value in expected[2].items() if not torch.equal(found[2][name], value)] == []


def assert_close(found: tuple[Any, Any, dict[str, torch.Tensor]], expected: tuple[Any, Any, Any]) -> None:
    """Replicas add up their own micro-batches first and round otherwise; other random numbers would differ more."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)


def assert_ends(directory: Path, said: str, *overrides: str) -> str:
    """The run fails with one line, which is also the reason in its record, and without a traceback."""
    done = train(directory, *overrides, "run_dir=run")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr
    made = record(directory / "run")
    assert made["status"] == "failed"
    assert said in made["reason"]
    return done.stderr


@pytest.mark.costly
def test_a_random_split_gives_a_pipeline_the_targets_of_its_inputs(directory: Path) -> None:
    expected = result(directory, "one", *ONE, "trainer.max_steps=60")
    assert_same(result(directory, "two", *PIPELINE, "trainer.max_steps=60"), expected)
    assert expected[0][-1] < 0.3  # chance is 0.69


RANDOM = {
    "samples in workers": (
        "data.target=mine:Augmented",
        "data.workers=2",
        "data.collate=mine:mixed",
        "loss.target=mine:noisy_loss",
    ),
    "layers that are recomputed": ("model.target=mine:skipping_model", "activation_checkpoint=full"),
}


@pytest.mark.costly
@pytest.mark.parametrize("what", RANDOM)
def test_what_a_pipeline_draws_is_what_one_process_draws(directory: Path, what: str) -> None:
    expected = result(directory, "one", *ONE, *(each for each in RANDOM[what] if "activation" not in each))
    assert_same(result(directory, "two", *PIPELINE, *RANDOM[what]), expected)


@pytest.mark.costly
def test_replicas_of_an_optimizer_that_draws_stay_equal(directory: Path) -> None:
    noise = ("optimizer=custom", "optimizer.target=mine:langevin", "schedule.twin_check_every=1")
    assert_close(result(directory, "two", *REPLICAS, *noise), result(directory, "one", *ONE, *noise))


def test_a_dataset_with_a_generator_of_its_own_ends_a_pipeline(directory: Path) -> None:
    said = "is not the same on ranks 0 and 1"  # of the first sample in 95 of 96 runs: two may draw the same
    assert SEED_IT in assert_ends(directory, said, *PIPELINE, "data.target=mine:OwnGenerator")


@pytest.mark.costly
def test_a_generator_that_draws_now_and_then_is_found_in_the_steps(directory: Path) -> None:
    """The few samples that are compared before the first step are no drawn ones."""
    said = "rank 1 loaded other samples than rank 0, so that inputs would meet other samples' targets"
    rare = ("data.target=mine:OwnGenerator", "data.kwargs.every=4", "data.workers=1", "data.check_every=3")
    assert SEED_IT in assert_ends(directory, said, *PIPELINE, *rare)


@pytest.mark.costly
def test_replicas_whose_data_is_in_other_orders_end(directory: Path) -> None:
    """Each would train on some samples twice and on others never."""
    assert_ends(directory, "is not the same on ranks 0 and 1", *REPLICAS, "data.target=mine:OwnOrder")


@pytest.mark.costly
def test_replicas_that_start_with_other_weights_end(directory: Path) -> None:
    said = (
        "before the first step: the copies of 2.weight on ranks 0 and 1 differ: the model function must make the same"
    )
    assert SEED_IT in assert_ends(directory, said, *REPLICAS, "model.target=mine:own_model")


@pytest.mark.costly
def test_a_resumed_run_draws_what_the_unbroken_one_draws(directory: Path) -> None:
    drawn = ("data.target=mine:Augmented", "data.collate=mine:mixed", "loss.target=mine:noisy_loss")
    layout = (*PIPELINE, *drawn, "data.workers=2", "checkpoint.every=7")
    expected = result(directory, "whole", *layout)
    result(directory, "part", *layout, "trainer.max_steps=7")
    assert_same(result(directory, "part", *layout, "resume=auto"), expected)


@pytest.mark.costly
def test_verify_draws_what_the_layout_draws(directory: Path) -> None:
    drawn = ("data.target=mine:Augmented", "data.collate=mine:mixed", "loss.target=mine:noisy_loss")
    command = [sys.executable, "-m", "runner", "verify", *REQUEST, *PIPELINE, *drawn, "--steps", "3"]
    done = warm.run(command, cwd=directory, env=environment(directory))
    assert done.returncode == 0, done.stderr
