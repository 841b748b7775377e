"""DeepSpeed's ZeRO over replicas of layers that ranks divide: the numbers of a plain loop in one process."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence

import pytest
import tensor_models
import torch
from torch import Tensor, nn
from zero_ranks import Result, train_groups

from runner.plan.values import RunPlan

PARTS = (
    "model.target=tensor_models:build", "data.target=tensor_models:data", "loss.target=tensor_models:loss",
    "parallelism.data=2", "parallelism.tensor=2", "optimizer.lr=0.01", "optimizer.eps=1e-3",
    "optimizer.weight_decay=0.1", "trainer.grad_clip_norm=0.5", "schedule.microbatches=2", "hardware=laptop_cpu",
    "trainer.max_steps=3",
    "parallelism.sharding={"
    + ",".join(f"{name}:'{way}'" for name, way in (tensor_models.RULES | {"*.head_norm": "partial"}).items())
    + "}",
)  # fmt: skip
RUNS = {
    "zero_2_tokens": (*PARTS, "zero.stage=2", "offload.optimizer=cpu", "parallelism.sequence=true"),
    "begun": (*PARTS, "zero.stage=2", "trainer.max_steps=2"),
    "resumed_3": (*PARTS, "zero.stage=3", "resume={begun}"),
}
SGD = (
    *(each for each in PARTS if not each.startswith(("optimizer.", "trainer.grad"))),
    "optimizer=sgd", "optimizer.lr=1", "optimizer.momentum=0", "optimizer.weight_decay=0", "trainer.grad_clip_norm=0.1",
    "parallelism.pipeline=2", "logger.name=csv",
)  # fmt: skip
CLIPPED = "sgd_2_in_a_pipeline"
START = {"start": [each for each in PARTS if "tensor=" not in each and "sharding" not in each and "data=2" not in each]}
_STANDING = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    place = tmp_path_factory.mktemp("parts")
    saved = {"begun": place / "begun" / "checkpoints" / "step-2.ckpt"}
    of_four = {
        name: [word.format(**saved) if "{begun}" in word else word for word in words] for name, words in RUNS.items()
    }
    groups: list[tuple[int, Mapping[str, Sequence[str]]]] = [
        (1, {name: [*words, *_STANDING] for name, words in START.items()}),
        (4, of_four),
        (8, {CLIPPED: (*SGD, "zero.stage=2")}),
    ]
    return train_groups(place, groups, seconds=800)


def train_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: float
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, weights and norms of gradients of a plain loop over whole batches."""
    losses, norms = [], []
    for step in range(3):
        samples = [tensor_models.data()[at] for at in range(8 * step, 8 * step + 8)]
        inputs, targets = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        loss = tensor_models.loss(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}, norms


def started(found: dict[str, Result]) -> nn.Module:
    """A model with the initial weights."""
    model = tensor_models.build()
    model.load_state_dict(found["start"].weights)
    return model


def norms_of(made: Result) -> list[float]:
    with (made.run_dir / "csv" / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        return [float(row["grad_norm"]) for row in csv.DictReader(lines) if row.get("grad_norm")]


@pytest.fixture(scope="module")
def plain(found: dict[str, Result]) -> tuple[list[float], dict[str, Tensor]]:
    model = started(found)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    losses, weights, _ = train_plainly(model, optimizer, 0.5)
    return losses, weights


_SCALARS = 64
"""Bytes of losses and norms, which meet at a peak or do not, as the ranks' threads happen to run."""


@pytest.mark.costly
@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_one_process_gives(
    name: str, found: dict[str, Result], plain: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, weights = plain
    made = found[name]
    assert made.record["status"] == "ok"
    assert made.loss == pytest.approx(losses[: len(made.loss)], rel=2e-6)
    if len(made.loss) == len(losses):
        for key, value in weights.items():
            torch.testing.assert_close(made.weights[key], value, rtol=0, atol=3e-5, msg=key)
    assert made.record["bytes_moved"]["tensor"] == RunPlan.load(made.run_dir).tensor_bytes_sent
    peak = made.record["peak_memory_bytes"]
    for counted, predicted in zip(peak["measured"], peak["predicted"], strict=True):
        assert (0.85 if name.endswith("_3") else 0.9) * predicted <= counted <= predicted + _SCALARS


@pytest.mark.costly
def test_gradients_are_clipped_by_the_norm_of_one_process(found: dict[str, Result]) -> None:
    """With SGD, which a wrong factor moves elsewhere. The norm counts parts of weights once, and whole ones once."""
    model, made = started(found), found[CLIPPED]
    losses, weights, norms = train_plainly(model, torch.optim.SGD(model.parameters(), lr=1), 0.1)
    assert min(norms) > 0.2
    assert made.loss == pytest.approx(losses, rel=1e-6)
    told = norms_of(made)
    assert told == pytest.approx(norms, rel=1e-6)
    for key, value in weights.items():
        torch.testing.assert_close(made.weights[key], value, rtol=1e-6, atol=1e-6, msg=key)
