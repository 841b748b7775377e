"""A loss of any kind equals plain PyTorch over the whole batch in every layout, or is refused before the first step."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import loss_kinds
import pytest
import torch
from layouts import train_in_threads
from torch import Tensor

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.profile import ModelProfile
from runner.profiling.model import profile_model
from runner.profiling.try_loss import try_loss

STEPS, RATE = 3, 0.1
KINDS = loss_kinds.RIGHT | loss_kinds.BY_DATA | loss_kinds.WRONG | loss_kinds.NEVER
IGNORING = ("no", "even", "uneven", "late")


class Draw(NamedTuple):
    """One request: the kind of its loss, which targets do not count, and its layout."""

    kind: str
    ignoring: str
    batch: int
    microbatches: int
    pipeline: int
    replicas: int
    seed: int

    @property
    def parts(self) -> int:
        return min(self.microbatches * self.replicas, self.batch)

    @property
    def must_be(self) -> str:
        """``refused``, ``equal``, or nothing where it depends on the numbers of targets."""
        if self.kind in loss_kinds.NEVER:
            return "refused"
        if self.kind in loss_kinds.RIGHT or self.parts == 1:
            return "equal"
        if self.kind in loss_kinds.WRONG:
            return "refused"
        counts_differ = self.ignoring in ("uneven", "late") or self.kind == "class_weighted"
        return "refused" if counts_differ else "equal"


def drawn(number: int) -> Draw:
    """The draw of a number; every kind comes once in so many draws as there are kinds."""
    choose = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    microbatches, pipeline, replicas = choose.randint(1, 4), choose.randint(1, 3), choose.randint(1, 2)
    return Draw(
        kind, choose.choice(IGNORING), choose.choice((4, 5, 6, 8, 12)), microbatches, pipeline, replicas,
        choose.randint(0, 1000),
    )  # fmt: skip


@cache
def base() -> tuple[RunConfig, ModelProfile]:
    """A request that the draws change, and what the trial asks of the model's size."""
    config = resolve(["model.target=loss_kinds:build", "data.target=loss_kinds:data", "device=cpu", "loss=custom",
                      "loss.target=loss_kinds:squares"])  # fmt: skip
    return config, profile_model(config)


def request(draw: Draw) -> RunConfig:
    config, _ = base()
    return replace(
        config,
        data=replace(config.data, batch_size=draw.batch, kwargs={"ignoring": draw.ignoring, "seed": draw.seed}),
        loss=replace(config.loss, target=f"loss_kinds:{draw.kind}"),
        schedule=replace(config.schedule, microbatches=draw.microbatches),
        parallelism=replace(config.parallelism, pipeline=draw.pipeline, data=draw.replicas),
    )


def plain(draw: Draw, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    model = loss_kinds.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for x, y in batches:
        made = KINDS[draw.kind](model(x), y)
        loss = made[0] / made[1] if isinstance(made, tuple) else made
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def outcome(draw: Draw) -> str:
    """``refused``, ``equal``, or what differs silently."""
    try:
        try_loss(request(draw), base()[1])
    except RequestError as error:
        line = str(error)
        assert line.startswith("loss.target = "), line
        assert "\n" not in line
        return "refused"
    rows = loss_kinds.data(ignoring=draw.ignoring, seed=draw.seed).tensors
    batches = [
        (rows[0][at : at + draw.batch], rows[1][at : at + draw.batch])
        for at in range(0, STEPS * draw.batch, draw.batch)
    ]
    expected, weights = plain(draw, batches)
    layout: dict[str, Any] = {
        "pipeline": draw.pipeline,
        "data": draw.replicas,
        "count": draw.microbatches,
        "schedule": "gpipe",
    }
    losses, found = train_in_threads(
        loss_kinds.build, KINDS[draw.kind], batches, optimizer=partial(torch.optim.SGD, lr=RATE), **layout
    )
    near = 2e-2 if draw.kind.startswith("rounded") else 2e-6
    for rank in losses:
        if rank != pytest.approx(expected, rel=near, abs=near * 0.1):
            return f"losses {rank} for {expected}"
    for name, value in weights.items():
        if not torch.allclose(found[name], value, rtol=1e-5 + near, atol=near):
            return f"{name} differs by {float((found[name] - value).abs().max())}"
    return "equal"


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_a_loss_is_equal_or_refused(number: int) -> None:
    draw = drawn(number)
    assert outcome(draw) == draw.must_be, draw
