"""One weird trick: ranks share out the batch for convolutions, and divide the fully connected layers behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
import sliced_models
import torch
from safetensors.torch import load_file
from torch import Tensor
from whole_runs import Run, peaks, train

from runner.config.compose.resolve import resolve
from runner.errors import RequestError

_STEPS = 3
_RULES = "parallelism.sharding={classifier.0:'column',classifier.2:'row',classifier.4:'column_gathered'}"
_COMMON = (
    "model=custom", "model.target=sliced_models:build", "data=custom", "data.target=sliced_models:data",
    "loss=cross_entropy", "data.batch_size=8", "data.shuffle=false", "optimizer=sgd", "optimizer.lr=0.1",
    "optimizer.momentum=0.9", "device=cpu", "hardware=laptop_cpu", "logger=none", "trainer.progress=false",
    "launcher.watchdog_seconds=null", f"trainer.max_steps={_STEPS}", "seed=5", "parallelism=weird_trick",
)  # fmt: skip


def run(folder: Path, *overrides: str) -> Run:
    folder.mkdir(exist_ok=True)
    return train(resolve([*_COMMON, *overrides]), folder)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("start")
    run(folder, _RULES, "optimizer.lr=1e-30", "trainer.max_steps=1")
    return load_file(folder / "weights.safetensors")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        ((_RULES,), 8),
        ((_RULES, "parallelism.tensor=4", "parallelism.batch_sliced=[features]"), 8),
        ((_RULES, "data.batch_size=7", "activation_checkpoint=full"), 7),  # which no rank has a part of
        ((_RULES, "parallelism.data=2", "schedule.microbatches=2"), 8),
    ],
)
def test_it_is_equal_to_one_process(
    layout: tuple[str, ...], batch: int, start: dict[str, Tensor], tmp_path: Path
) -> None:
    made = run(tmp_path, *layout)
    losses, weights = sliced_models.trained(start, batch, _STEPS)
    torch.testing.assert_close(torch.tensor(made.losses), torch.tensor(losses), rtol=2e-6, atol=2e-6)
    for name, value in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=3e-6, msg=name)
    for counted, predicted in peaks(made):
        assert 0.9 * predicted <= counted <= predicted


@pytest.mark.costly
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula(ranks: int, tmp_path: Path) -> None:
    """Of all ranks, in a step: weights of convolutions are summed; the last of their outputs is gathered, and its
    gradient shared out; the sums of the divided layers; and three numbers for each target's logits."""
    made = run(tmp_path, _RULES, f"parallelism.tensor={ranks}")
    model = sliced_models.build()
    convolutions = sum(each.numel() for each in model.features.parameters())
    flat, batch = sliced_models.CHANNELS * 16, 8
    elements = 2 * convolutions + batch * (2 * flat + 2 * sliced_models.HIDDEN + 2 * sliced_models.HIDDEN)
    logits = batch * (2 + 2 + ranks)  # two sums, and a largest of all ranks' numbers
    expected = 4 * (ranks - 1) * (elements + logits)
    assert made.plan.tensor_bytes_sent == expected
    assert made.record.bytes_moved["tensor"] == expected


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ((_RULES, "+model.kwargs.norm=true"), "features.3.*takes statistics of the batch"),
        ((), "batch_sliced.*needs rules for what is divided"),
        ((_RULES, "parallelism.pipeline=2"), "batch_sliced.*needs parallelism.pipeline=1"),
        ((_RULES, "parallelism.batch_sliced=[feature]"), "feature: must name modules.*Did you mean features"),
    ],
)
def test_what_cannot_be_sliced_is_refused(overrides: tuple[str, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=text):
        run(tmp_path, *overrides)
