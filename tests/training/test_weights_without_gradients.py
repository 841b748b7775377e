"""States of weights that no gradient reaches are not predicted where the optimizer makes none, and nowhere too few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from thread_runs import result
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner.optim.catalogue.registry import OPTIMIZERS

_WIDTH, _MORE = 48, 96


class Spare(nn.Module):
    """A layer with a branch that its forward takes only if ``kind`` lets it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.used = nn.Linear(_WIDTH, _WIDTH)
        self.spare = nn.Sequential(nn.Linear(_WIDTH, _MORE), nn.Linear(_MORE, _WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        made = value + torch.tanh(self.used(value))
        self.calls += self.kind == "late"
        return made + self.spare(value) if self._takes_it(value) else made

    def _takes_it(self, value: Tensor) -> bool:
        if self.kind == "short":
            return len(value) == 1
        if self.kind == "expert":
            return bool((value > 1e6).any())
        return self.calls > 10**6 if self.kind == "late" else self.kind == "random" and np.random.random() > 1


def build(kind: str = "never") -> nn.Sequential:
    return nn.Sequential(*(Spare(kind) for _ in range(4)), nn.Linear(_WIDTH, 3))


class Traced(nn.Module):
    """The same as one module, which a pipeline must trace."""

    def __init__(self) -> None:
        super().__init__()
        self.all = build()

    def forward(self, value: Tensor) -> Any:
        return self.all(value)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, _WIDTH, generator=generator), torch.arange(16) % 3)


_QUIET = (
    f"model.target={__name__}:build", f"data.target={__name__}:samples", "loss=cross_entropy", "data.batch_size=8",
    "device=cpu", "trainer.max_steps=3", "checkpoint=none", "logger=none",
)  # fmt: skip


def _peaks(place: Path, *words: str) -> tuple[list[int], list[int]]:
    """The peaks of all ranks, as predicted and as counted."""
    made, _ = result(place, words=(*_QUIET, *words))
    return made["peak_memory_bytes"]["predicted"], made["peak_memory_bytes"]["measured"]


_TWO = ("parallelism.pipeline=2", "schedule.microbatches=2")


@pytest.mark.parametrize(
    "words",
    [
        _TWO,
        (*_TWO, "schedule=zb_h1", "parallelism.data=2", "zero.stage=1"),  # whose flat parts have states of all weights
        (*_TWO, "trainer.ema_decay=0.9"),
        (*_TWO, "precision=bf16_master"),
        (*_TWO, "precision=fp16_mixed"),
        (*_TWO, "optimizer=sgd", "optimizer.momentum=0.9", "parallelism.data=2"),
        (*_TWO, "parallelism.data=2", "trainer.grad_clip_norm=1", "optimizer.weight_decay=0.1"),
    ],
    ids=lambda words: "-".join(word.partition(".")[2] or word for word in words),
)
def test_a_branch_that_is_not_traced_is_planned_as_it_is_counted(words: tuple[str, ...], tmp_path: Path) -> None:
    predicted, counted = _peaks(tmp_path, *words, f"model.target={__name__}:Traced")
    for planned, found in zip(predicted, counted, strict=True):
        assert found <= planned <= 1.01 * found


def test_a_branch_for_smaller_micro_batches_is_planned(tmp_path: Path) -> None:
    words = ("parallelism.pipeline=2", "schedule.microbatches=4", "data.batch_size=6", "model.kwargs.kind=short")
    predicted, counted = _peaks(tmp_path, *words)
    assert all(found <= planned for planned, found in zip(predicted, counted, strict=True))


@pytest.mark.parametrize("kind", ["never", "expert", "late", "random"])
def test_a_branch_that_may_run_keeps_its_bound(kind: str, tmp_path: Path) -> None:
    (predicted,), (counted,) = _peaks(tmp_path, f"model.kwargs.kind={kind}")
    weights = sum(weight.nbytes for name, weight in build(kind).named_parameters() if "spare" in name)
    assert predicted >= counted + 2 * weights


@pytest.mark.parametrize("words", [("compression=powersgd", "parallelism.data=2"), ("offload=weights_granular",)])
def test_states_that_may_be_there_nevertheless_are_planned(words: tuple[str, ...], tmp_path: Path) -> None:
    predicted, counted = _peaks(tmp_path, *words)
    assert all(found <= planned for planned, found in zip(predicted, counted, strict=True))


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.by_weight])
def test_the_states_of_a_weight_are_made_with_its_first_gradient(name: str) -> None:
    from runner.config.compose.resolve import resolve
    from runner.optim.build import build_optimizer

    reached, other = (nn.Parameter(torch.ones(4)) for _ in range(2))
    section = resolve(
        ["model=mlp", f"optimizer={name}", "optimizer.weight_decay=0.1", "optimizer.momentum=0.9"]
    ).optimizer
    optimizer = build_optimizer(section, [reached, other])
    reached.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[reached]
    assert not optimizer.state.get(other)
