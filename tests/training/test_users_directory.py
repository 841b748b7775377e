"""A user's own module, with nothing of the runner in it, trains in any layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import user_code
from thread_runs import result
from user_project import assert_same_weights, make_directory, plain_result
from user_project import result as result_of_command


def test_nothing_of_the_runner_is_imported() -> None:
    text = Path(user_code.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) runner", text, re.MULTILINE)


@pytest.mark.costly
def test_layers_that_each_rank_builds_itself_and_shuffled_samples(tmp_path: Path) -> None:
    """Weights are seeded by layer and samples by epoch: neither depends on the layout."""
    overrides = ("model.target=user_code:Lazy", "data.shuffle=true", "schedule.microbatches=2")
    (one, weights), (four, same) = (
        result(tmp_path, *overrides, f"parallelism.pipeline={pipeline}", run=f"run{pipeline}") for pipeline in (1, 4)
    )
    assert one["loss"] == four["loss"]
    assert_same_weights(same, weights)
    unshuffled, _ = result(tmp_path, *overrides[::2], run="in_order")
    assert unshuffled["loss"] != one["loss"]


@pytest.mark.costly
def test_sums_with_weights_own_options_and_a_data_module(tmp_path: Path) -> None:
    """By the command, in a directory of the user's own."""
    directory = make_directory(tmp_path)
    (directory / "conf" / "optimizer").mkdir(parents=True)
    (directory / "conf" / "optimizer" / "mine.yaml").write_text("name: sgd\nlr: 0.5\nmomentum: 0.0\n")
    made, weights = result_of_command(
        directory, "loss.target=mine:counted", "optimizer=mine", "data.target=mine:lightning_data",
        "parallelism.pipeline=2", "schedule.microbatches=3", "model.kwargs.width=9",
    )  # fmt: skip
    losses, state = plain_result(
        lambda: user_code.model(width=9), user_code.counted, count=3,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )  # fmt: skip
    assert made["loss"] == losses
    assert_same_weights(weights, state)
    assert len(made["val_loss"]) == 1


@pytest.mark.costly
def test_a_last_step_with_fewer_samples_than_replicas(tmp_path: Path) -> None:
    """17 samples: the third step has one, and the second replica none of it."""
    made, weights = result(tmp_path, "data.kwargs.samples=17", "parallelism.data=2", "schedule.microbatches=2")
    losses, state = plain_result(samples=17, replicas=2, by_replica=True, count=2)
    assert made["loss"] == losses
    assert_same_weights(weights, state)
