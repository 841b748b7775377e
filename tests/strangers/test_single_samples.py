"""Models that do not take a single sample are refused before a run whose micro-batches have one, also the last."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.model.traced.operators import trace
from runner.model.traced.segments import split
from runner.plan.layout.single_samples import has_single, last_step, with_two_samples
from runner.profiling.model import profile_model
from runner.profiling.single_samples import try_single_samples
from runner.training.first_batches import first_batches

HERE = "test_single_samples"


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Squeezed(nn.Linear):
    """Takes axes of one element away, of which the batch's may be one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


def squeezed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), Squeezed(8, 3))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


def points(count: int = 17) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator))


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.norm(self.first(x)))
        return made


def request(model: str, *words: str) -> RunConfig:
    named = [f"model.target={HERE}:{model}", f"data.target={HERE}:points", "loss=cross_entropy", "device=cpu"]
    return resolve([*named, "data.batch_size=8", "trainer.max_epochs=1", *words])


def tried(config: RunConfig) -> None:
    first = first_batches(config)
    try_single_samples(config, first.training, first.samples)


@pytest.mark.parametrize(("model", "what"), [("normed", r"Layer 1 \(BatchNorm1d\)"), ("squeezed", "The loss")])
def test_the_last_step_of_an_epoch_is_tried(model: str, what: str) -> None:
    said = (
        rf"data\.drop_last = false: .* 1 of 17 samples, has one\. {what} does not take it\..* Try data\.drop_last=true"
    )
    with pytest.raises(RequestError, match=said):
        tried(request(model))
    tried(request(model, "data.drop_last=true"))
    tried(request(model, "data.kwargs={count:18}"))
    tried(request("plain"))


def test_a_run_that_ends_before_a_short_step_has_none() -> None:
    steps = request("normed", "trainer.max_epochs=null", "trainer.max_steps=2")
    tried(steps)
    assert last_step(steps, 17) == 0
    assert last_step(request("normed"), 17) == 1


def test_an_uneven_cut_of_each_step_is_tried() -> None:
    config = request("normed", "data.batch_size=9", "data.drop_last=true", "schedule.microbatches=8")
    with pytest.raises(RequestError, match=r"schedule\.microbatches = 8: .* Try schedule\.microbatches=4"):
        tried(config)
    tried(request("normed", "data.batch_size=9", "data.drop_last=true", "schedule.microbatches=4"))


def test_micro_batches_that_all_have_one_sample_are_refused_with_the_way() -> None:
    with pytest.raises(RequestError, match=r"Each micro-batch has one sample\..* Try schedule\.microbatches=4"):
        profile_model(request("normed", "schedule.microbatches=8"))


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["schedule.microbatches=8"], "schedule.microbatches=4"),
        (["parallelism.data=2", "schedule.microbatches=4"], "schedule.microbatches=2"),
        (["parallelism.data=8"], "data.batch_size=16"),
        (["parallelism.pipeline=4", "parallelism.data=2", "schedule.microbatches=4"], "data.batch_size=16"),
    ],
)
def test_what_is_suggested_has_two_samples(words: list[str], fix: str) -> None:
    config = request("normed", *words)
    assert has_single(config, 8)
    assert with_two_samples(config, 8) == fix
    changed = request("normed", *words, fix)
    assert not has_single(changed, changed.data.batch_size)


def test_a_trace_refuses_one_value_per_channel_as_torch_does() -> None:
    model = Traced()
    ((_, segment),) = split(model, trace(model, torch.randn(4, 4), "mine:build"), [])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        segment(torch.randn(1, 4))
    assert model.norm.running_var is not None
    assert model.norm.running_var.isfinite().all()
    segment.eval()
    segment(torch.randn(1, 4))
