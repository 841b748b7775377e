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
from thread_runs import result
from torch import nn
from user_project import assert_same_weights, make_directory, train
from user_project import result as result_of_command

from runner.model.data import Collate, LossFunction

STEPS = 8  # two epochs of 29 samples in batches of 8
PIPELINES = {
    "pipeline2": ("parallelism.pipeline=2",),
    "pipeline3": ("parallelism.pipeline=3",),
    "data2": ("parallelism.data=2",),
}
POINTS = {
    "map": ("data.target=user_code:points", "data.kwargs.samples=29"),
    "iterable": ("data.target=user_code:passing",),
}
WORDS = (
    "model.target=user_code:reader", "loss.target=user_code:each_word", "data.collate=user_code:padded",
)  # fmt: skip
SENTENCES = {"map": "data.target=user_code:sentences", "iterable": "data.target=user_code:passing_sentences"}


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


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "layout"), [("map", "pipeline3"), ("iterable", "data2")])
def test_29_samples_in_batches_of_8_over_two_epochs(tmp_path: Path, kind: str, layout: str) -> None:
    words = (*POINTS[kind], *PIPELINES[layout], "schedule.microbatches=3", f"trainer.max_steps={STEPS}")
    made, weights = result(tmp_path, *words)
    data = user_code.points(29)[0]
    pairs = [data[i] for i in range(29)]
    collate = torch.utils.data.default_collate
    replicas = 2 if layout == "data2" else 1
    losses, expected = plain(user_code.model, user_code.mean, pairs, collate, replicas=replicas)
    assert made["loss"] == losses
    assert_same_weights(weights, expected)


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "layout"), [("map", "data2"), ("iterable", "pipeline3")])
def test_lengths_that_change_with_every_batch(tmp_path: Path, kind: str, layout: str) -> None:
    words = (*WORDS, SENTENCES[kind], *PIPELINES[layout], "schedule.microbatches=3", f"trainer.max_steps={STEPS}")
    made, weights = result(tmp_path, *words)
    samples = user_code.sentences()
    replicas = 2 if layout == "data2" else 1
    losses, expected = plain(user_code.reader, user_code.each_word, samples, user_code.padded, replicas=replicas)
    assert made["loss"] == losses
    assert_same_weights(weights, expected)


@pytest.mark.costly
def test_validation_of_an_iterable_set_is_the_mean_over_it(tmp_path: Path) -> None:
    common = ("parallelism.pipeline=3", "schedule.microbatches=3", "trainer.val_every=2")
    passing, _ = result(tmp_path, *POINTS["iterable"], *common, run="iterable")
    numbered, _ = result(tmp_path, *POINTS["map"], *common, run="map")
    assert passing["val_loss"] == numbered["val_loss"]
    assert [step for step, _ in passing["val_loss"]] == [2, 4]


@pytest.mark.costly
def test_an_iterable_run_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    """By the command, because loaders have processes."""
    directory = make_directory(tmp_path)
    common = ("data.target=mine:passing", "parallelism.pipeline=2", "schedule.microbatches=3", "data.workers=2")
    whole, expected = result_of_command(directory, *common, "trainer.max_steps=7", run="whole")
    assert train(directory, *common, "trainer.max_steps=5", "run_dir=cut").returncode == 0
    resumed, weights = result_of_command(directory, *common, "trainer.max_steps=7", "resume=auto", run="cut")
    assert resumed["loss"] == whole["loss"]
    assert_same_weights(weights, expected)
