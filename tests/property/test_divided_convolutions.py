"""Convolutions whose channels ranks divide: equal to one process, with bytes and peaks as planned."""

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
_COMMON = (
    "model=custom", "model.target=sliced_models:build", "data=custom", "data.target=sliced_models:data",
    "loss=cross_entropy", "data.batch_size=8", "data.shuffle=false", "optimizer=sgd", "optimizer.lr=0.1",
    "optimizer.momentum=0.9", "device=cpu", "hardware=laptop_cpu", "logger=none", "trainer.progress=false",
    "launcher.watchdog_seconds=null", f"trainer.max_steps={_STEPS}", "seed=5", "parallelism.tensor=2",
)  # fmt: skip
_MAPS = "classifier.2:'column',classifier.4:'row'"


def rules(first: str, second: str, behind: str) -> str:
    return f"parallelism.sharding={{features.0:'{first}',features.3:'{second}',classifier.0:'{behind}',{_MAPS}}}"


def run(folder: Path, *overrides: str) -> Run:
    folder.mkdir(exist_ok=True)
    return train(resolve([*_COMMON, *overrides]), folder)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("start")
    run(folder, "parallelism.tensor=1", "optimizer.lr=1e-30", "trainer.max_steps=1")
    return load_file(folder / "weights.safetensors")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("layout", "sent"),
    [
        # two sums of what the second convolution makes, and of the input of the classifier's third map
        ((rules("column", "row", "whole"),), 2 * 6 * 16 + 2 * 8 + 2 * 20),
        # gathered maps of features; the gradients of what the second convolution reads are summed
        ((rules("column_gathered", "column", "row"),), 6 * 64 + 2 * 6 * 16 + 2 * 20 + 2 * 8 + 2 * 20),
        ((rules("whole", "row_whole_input", "whole"), "schedule.microbatches=2"), None),
        ((rules("column", "row", "whole"), "parallelism.data=2", "zero.stage=1"), None),
    ],
)  # fmt: skip
def test_it_is_equal_to_one_process(
    layout: tuple[str, ...], sent: int | None, start: dict[str, Tensor], tmp_path: Path
) -> None:
    made = run(tmp_path, *layout)
    losses, weights = sliced_models.trained(start, 8, _STEPS)
    torch.testing.assert_close(torch.tensor(made.losses), torch.tensor(losses), rtol=2e-6, atol=2e-6)
    for name, value in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=3e-6, msg=name)
    for counted, predicted in peaks(made):
        assert 0.9 * predicted <= counted <= predicted
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent
    if sent is not None:
        assert made.plan.tensor_bytes_sent == 4 * 8 * sent  # both ranks, half of each exchange, and 8 samples


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ((rules("column", "row", "whole"), "parallelism.tensor=4"), "Its 6 output features cannot be divided by 4"),
        ((rules("column_gathered", "whole", "whole"), "parallelism.tensor=4"), "Its 6 output features"),
        ((rules("column", "row", "whole"), "+model.kwargs.groups=2"), "It is a Conv2d of 2 groups"),
    ],
)
def test_what_cannot_be_divided_is_refused(overrides: tuple[str, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=text):
        run(tmp_path, *overrides)
