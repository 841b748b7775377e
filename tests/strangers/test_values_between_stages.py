"""Values of many kinds between layers: equal to plain PyTorch over whole batches, or refused before step 1."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import NamedTuple

import boundary_values
import pytest
import torch
from boundary_values import CARRIED, WHOLE
from layouts import train_in_threads
from torch import Tensor

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.memory.apply.install import install
from runner.plan.make import make_plan
from runner.profiling.model import profile_model

STEPS, BATCH = 3, 8
DRAWS = int(os.environ.get("RUNNER_DRAWS_OF_VALUES", "16"))
SCHEDULES = {2: ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"], 3: ["gpipe", "1f1b", "zb_h1"]}
POLICIES = ["none", "none", "full", "chen_sqrt", "kusumoto", "dtr"]


class Draw(NamedTuple):
    """A model, and how it is trained."""

    kinds: list[str]
    pipeline: int
    schedule: str
    microbatches: int
    policy: str
    seed: int = 0

    @property
    def words(self) -> list[str]:
        words = [
            "model.target=boundary_values:build", f"+model.kwargs.kinds=[{','.join(map(repr, self.kinds))}]",
            f"+model.kwargs.seed={self.seed}", "data.target=boundary_values:data", "loss.target=boundary_values:loss",
            "optimizer=sgd", "optimizer.lr=0.1", "lr_scheduler=constant", f"data.batch_size={BATCH}",
            "data.shuffle=false", f"parallelism.pipeline={self.pipeline}", f"schedule={self.schedule}",
            f"activation_checkpoint={self.policy}", "device=cpu", "hardware=a100_80gb", "logger=none",
        ]  # fmt: skip
        return [*words, f"schedule.microbatches={self.microbatches}"]


def batches() -> list[tuple[Tensor, Tensor]]:
    data = boundary_values.data()
    inputs, targets = data.tensors
    return [(inputs[at : at + BATCH], targets[at : at + BATCH]) for at in range(0, STEPS * BATCH, BATCH)]


def plain(draw: Draw) -> tuple[list[float], dict[str, Tensor]]:
    """What plain PyTorch gives for whole batches."""
    model = boundary_values.build(draw.kinds, draw.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        value = boundary_values.loss(model(inputs.clone()), targets)
        value.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, model.state_dict()


def run(draw: Draw) -> tuple[list[float], dict[str, Tensor]]:
    """What a plan gives whose stages are threads.

    Raises:
        RequestError: the plan is refused.
    """
    config = resolve(draw.words)
    profile = profile_model(config)
    plan = make_plan(config, profile)
    losses, weights = train_in_threads(
        partial(boundary_values.build, draw.kinds, draw.seed),
        boundary_values.loss,
        batches(),
        schedule=plan.schedule,
        pipeline=draw.pipeline,
        data=1,
        count=draw.microbatches,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        cut=plan.partition,
        prepare=lambda stage, number: install(stage, plan.activations.stages[number]),
        sizes_vary=profile.sizes_vary,
    )
    return losses[0], weights


def assert_equal_or_refused(draw: Draw) -> str:
    """Return "equal", or the reason of a refusal."""
    expected, state = plain(draw)
    try:
        losses, weights = run(draw)
    except RequestError as error:
        return str(error)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(weights, dict(state), rtol=2e-6, atol=2e-7)
    return "equal"


@pytest.fixture(autouse=True)
def _own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path_factory.getbasetemp() / "profiles"))


def drawn(number: int) -> Draw:
    """Two kinds, one after the other, in a layout of some kind; every kind comes in its turn."""
    chosen = random.Random(number)
    kinds = [CARRIED[number % len(CARRIED)], chosen.choice(CARRIED)]
    pipeline = chosen.choice([2, 2, 3])
    microbatches = 1 if WHOLE & set(kinds) else chosen.choice([1, 2, 4])
    schedules = SCHEDULES[pipeline]
    if microbatches == 1:
        schedules = [name for name in schedules if name != "interleaved_1f1b"]
    return Draw(kinds, pipeline, chosen.choice(schedules), microbatches, chosen.choice(POLICIES), number)


@pytest.mark.parametrize("number", random.Random(os.environ.get("RUNNER_DRAWS_SEED", "5")).sample(range(10**6), DRAWS))
def test_draws(number: int) -> None:
    draw = drawn(number)
    told = assert_equal_or_refused(draw)
    if told != "equal":
        assert "changed in place" in draw.kinds, (draw, told)
        assert "in place" in told, (draw, told)
