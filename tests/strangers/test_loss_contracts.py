"""What is said of a loss that breaks its contract, and what is no break of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import loss_kinds
import pytest
import torch
from test_losses import Draw, base, request

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.engine.loss_scale import LossScale, LossScaling
from runner.errors import RequestError
from runner.profiling.model import profile_model
from runner.profiling.try_loss import try_loss

UNEVEN = Draw("token_mean", "uneven", 8, 2, 1, 1, seed=2)

SAID = {
    "token_mean": (
        "loss.target = loss_kinds:token_mean: must return a mean over samples, or (sum, weight). Of 8 samples at once, "
        "and of the same in parts of 4, 4, it gives {whole} and {parts}: each number of micro-batches and replicas "
        "would train another model. Try return (sum, weight), or schedule.microbatches=1 parallelism.data=1."
    ),
    "by_length": "the gradients by the output differ by ",
    "of_each": "It has many values. Try return loss.mean().",
    "two_terms": (
        "The second value requires a gradient, as a term of the loss does: terms are added up to one. "
        "Try return first + second."
    ),
    "with_accuracy": "must return (sum, weight), which add up over samples.",
    "with_name": 'It returned a dict with loss. Try return made["loss"].',
    "of_negative_weight": (
        "loss.target = weight -8: must return (sum, weight) with a weight that is finite and not below 0."
    ),
    "tempered": "must have no weights of its own to train. Its weights (scale) are not the model's",
    "by_a_weight_outside": "Its weights (of shape (7,)) are not the model's, and would not be trained.",
    "Tempered": "must be a function of output and target. Tempered is a class, to be made without them. Try an object",
    "running": "must give the same for the same output and target.",
}


def refusal(config: RunConfig) -> str:
    with pytest.raises(RequestError) as caught:
        try_loss(config, base()[1])
    return str(caught.value)


@pytest.mark.costly
@pytest.mark.parametrize("kind", SAID)
def test_a_refusal_is_one_line_that_says_what_to_return(kind: str) -> None:
    x, y = (each[:8] for each in loss_kinds.data(seed=2).tensors)
    with torch.no_grad():
        output = loss_kinds.build()(x)
        whole, *halves = (
            float(loss_kinds.token_mean(output[rows], y[rows])) for rows in (slice(8), slice(4), slice(4, 8))
        )
    numbers = {"whole": f"{whole:.5g}", "parts": f"{sum(halves) / 2:.5g}"}
    line = refusal(request(UNEVEN._replace(kind=kind)))
    assert SAID[kind].format(**numbers) in line
    assert "\n" not in line


def test_a_loss_that_draws_is_refused_only_where_its_mean_differs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        try_loss(request(UNEVEN._replace(kind="noisy")), base()[1])
    assert "was not tried" not in caplog.text
    assert "in the mean of 12 draws" in refusal(request(UNEVEN._replace(kind="noisy_sum")))


def test_a_value_that_is_not_finite_is_no_break_of_the_contract() -> None:
    try_loss(request(UNEVEN._replace(kind="not_finite")), base()[1])


def own(kind: str, microbatches: int = 2) -> RunConfig:
    config = request(UNEVEN._replace(microbatches=microbatches))
    return replace(
        config,
        model=replace(config.model, target="loss_kinds:stepping", kwargs={"kind": kind}),
        loss=replace(config.loss, name="auto", target="runner.zoo.losses:cross_entropy"),
        optimizer=replace(config.optimizer, name="auto", lr=base()[0].optimizer.lr),
    )


@pytest.mark.parametrize("kind", ["token_mean", "summed", "contrastive", "annealed"])
def test_a_training_step_is_tried_as_a_loss_is(kind: str) -> None:
    line = refusal(own(kind))
    assert line.startswith("model.target = loss_kinds:stepping (Stepping.training_step): must ")


@pytest.mark.parametrize("kind", ["over_samples", "token_pair", "tempered", "squares", "penalised"])
def test_a_training_step_that_is_right_is_taken(kind: str) -> None:
    """A pair's weight is beside the loss in the step's dict; weights of a module's loss are the module's own."""
    try_loss(own(kind), base()[1])


def test_one_micro_batch_may_compare_its_samples() -> None:
    try_loss(own("contrastive", microbatches=1), base()[1])


@pytest.mark.parametrize(("kind", "is_right"), [("squares", True), ("summed", False)])
def test_a_model_that_returns_its_loss_is_run_on_parts(kind: str, is_right: bool) -> None:
    config = request(UNEVEN)
    config = replace(
        config,
        model=replace(config.model, target="loss_kinds:losing", kwargs={"kind": kind}),
        loss=replace(config.loss, target="loss_kinds:as_it_is"),
        data=replace(config.data, target="loss_kinds:both"),
    )
    if is_right:
        try_loss(config, base()[1])
    else:
        assert refusal(config).startswith("loss.target = loss_kinds:as_it_is: must return a mean over samples")


def test_the_scale_is_one_of_the_mean() -> None:
    """A step of 8 samples with 96 tokens, in all: sums of tokens are 12 times as large as those of samples."""
    scale = LossScale(LossScaling(initial_scale=1024.0, samples=8))
    assert scale.of_sum == 128.0
    scale.weigh(96.0)
    assert scale.of_sum == 16.0
    scale.weigh(5.0)
    assert scale.of_sum == 16.0
    again: Any = LossScale(LossScaling(initial_scale=1024.0, samples=8))
    again.load_state_dict(scale.state_dict())
    assert again.of_sum == 16.0
    again.load_state_dict({"value": 1024.0, "good_steps": 0})  # of a run before there were such weights
    assert again.of_sum == 16.0


NUMBERS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    return nn.Sequential(nn.Linear(3, 2))

def numbers():
    x = torch.ones(16, 3)
    return TensorDataset(x, x[:, :2] * 2)

def probabilities():
    x = torch.ones(16, 3)
    return TensorDataset(x, x[:, :2] / 2)
"""


def test_a_loss_is_not_guessed_for_targets_that_are_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_numbers.py").write_text(NUMBERS)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model.target=of_numbers:build", "data.batch_size=8"]
    profile_model(resolve([*words, "data.target=of_numbers:probabilities"]))
    profile_model(resolve([*words, "data.target=of_numbers:numbers", "loss=mse"]))
    with pytest.raises(RequestError, match="loss = auto: must be named for these targets.* sums to 4 .*Try loss=mse"):
        profile_model(resolve([*words, "data.target=of_numbers:numbers"]))
