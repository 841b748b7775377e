"""Data that does not divide evenly, has no length, or changes its shapes with every batch: equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
from narrow import present
from reference import accumulate
from torch import nn
from user_project import assert_same_weights, make_directory, result, train

from runner.model.data import Collate, LossFunction

pytestmark = pytest.mark.slow
STEPS = 8  # two epochs of 29 samples in batches of 8
PIPELINES = {
    "pipeline2": ("parallelism.pipeline=2",),
    "pipeline3": ("parallelism.pipeline=3",),
    "data2": ("parallelism.data=2",),
}
POINTS = {"map": ("data.target=mine:points", "data.kwargs.samples=29"), "iterable": ("data.target=mine:passing",)}
WORDS = (
    "model.target=mine:reader", "loss.target=mine:each_word", "data.collate=mine:padded",
)  # fmt: skip
SENTENCES = {"map": "data.target=mine:sentences", "iterable": "data.target=mine:passing_sentences"}


def plain(
    model: Callable[[], nn.Module], loss: LossFunction, samples: list[Any], collate: Collate, *,
    replicas: int = 1, count: int = 3,
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """Two epochs of a plain loop: each replica's samples of a step are collated on their own, then cut in ``count``."""
    torch.manual_seed(0)
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    steps = [samples[at : at + 8] for at in range(0, len(samples), 8)]
    for step in (steps + steps)[:STEPS]:
        bounds = [len(part) for part in torch.arange(len(step)).tensor_split(replicas)]
        parts, start = [], 0
        for size in bounds:
            x, y = collate(step[start : start + size])
            parts.append(list(zip(x.tensor_split(count), y.tensor_split(count), strict=True)))
            start += size
        sums = [accumulate(made, loss, pairs, torch.float32) for pairs in parts]
        total, weight = sum(part[0] for part in sums), sum(part[1] for part in sums)
        for index, parameter in enumerate(made.parameters()):
            gradients = (present(part[2][index]) for part in sums)
            parameter.grad = sum(gradients, torch.zeros_like(parameter)).div_(weight)
        optimizer.step()
        losses.append(total / weight)
    return losses, made.state_dict()


@pytest.mark.parametrize(
    ("kind", "layout", "workers"),
    [
        ("map", "pipeline3", 0),
        ("iterable", "data2", 2),
        pytest.param("iterable", "pipeline3", 2, marks=pytest.mark.full),
        pytest.param("iterable", "pipeline2", 0, marks=pytest.mark.full),
    ],
)
def test_29_samples_in_batches_of_8_over_two_epochs(tmp_path: Path, kind: str, layout: str, workers: int) -> None:
    made, weights = result(
        make_directory(tmp_path), *POINTS[kind], *PIPELINES[layout], "schedule.microbatches=3",
        f"trainer.max_steps={STEPS}", f"data.workers={workers}",
    )  # fmt: skip
    data = user_code.points(29)[0]
    pairs = [data[i] for i in range(29)]
    replicas = 2 if layout == "data2" else 1
    collate = torch.utils.data.default_collate
    losses, expected = plain(user_code.model, user_code.mean, pairs, collate, replicas=replicas)
    assert made["loss"] == losses
    assert_same_weights(weights, expected)


@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param("map", "data2", marks=pytest.mark.full), ("iterable", "pipeline3")]
)
def test_lengths_that_change_with_every_batch(tmp_path: Path, kind: str, layout: str) -> None:
    made, weights = result(
        make_directory(tmp_path), *WORDS, SENTENCES[kind], *PIPELINES[layout], "schedule.microbatches=3",
        f"trainer.max_steps={STEPS}",
    )  # fmt: skip
    samples = user_code.sentences()
    replicas = 2 if layout == "data2" else 1
    losses, expected = plain(user_code.reader, user_code.each_word, samples, user_code.padded, replicas=replicas)
    assert made["loss"] == losses
    assert_same_weights(weights, expected)


def test_validation_of_an_iterable_set_is_the_mean_over_it(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    common = ("parallelism.pipeline=3", "schedule.microbatches=3", "trainer.val_every=2")
    passing, _ = result(directory, *POINTS["iterable"], *common, run="iterable")
    numbered, _ = result(directory, *POINTS["map"], *common, run="map")
    assert passing["val_loss"] == numbered["val_loss"]
    assert [step for step, _ in passing["val_loss"]] == [2, 4]


def test_an_iterable_run_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    common = (*POINTS["iterable"], "parallelism.pipeline=2", "schedule.microbatches=3", "data.workers=2")
    whole, expected = result(directory, *common, "trainer.max_steps=7", run="whole")
    assert train(directory, *common, "trainer.max_steps=5", "run_dir=cut").returncode == 0
    resumed, weights = result(directory, *common, "trainer.max_steps=7", "resume=auto", run="cut")
    assert resumed["loss"] == whole["loss"]
    assert_same_weights(weights, expected)
