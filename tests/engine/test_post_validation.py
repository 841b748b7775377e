"""With post-validation the trajectory is, bit for bit, the one of ranks that wait for each other at every STEP."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from narrow import present
from reference import train
from test_equality import from_file
from test_precision import OverflowsOnce
from torch import nn

from runner.engine.loss_scale import LossScaling
from runner.engine.options import TakenBack
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.errors import RunFailedError
from runner.schedule.catalogue import registry
from runner.schedule.lowering.program import lower
from runner.schedule.lowering.speculate import speculation
from runner.schedule.values import Op, Schedule

BATCH, COUNT, STEPS = 10, 4, 6
adamw = partial(torch.optim.AdamW, lr=3e-2, weight_decay=0.1)
cross_entropy = nn.functional.cross_entropy


def make_model(overflow_at: int | None = None, dropout: float = 0.2, middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 12), nn.Dropout(dropout), nn.Tanh(), nn.Linear(12, 5)]
    if middle is not None:
        layers[2] = copy.deepcopy(middle)
    if overflow_at is not None:
        layers[overflow_at] = nn.Sequential(layers[overflow_at], OverflowsOnce(2))
    return nn.Sequential(*layers)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, 6, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


Ran = tuple[list[tuple[float, float | None]], dict[str, torch.Tensor], list[TakenBack]]
"""A rank's losses with their scales, its weights and buffers at the end, and what it has taken back."""


def run(
    schedule: Schedule, *, data: int = 1, model: dict[str, Any] | None = None, falling: bool = False, **options: Any
) -> list[Ran]:
    """Train on every rank; a learning rate that falls is set before each step."""
    pipeline = schedule.ranks
    models = [make_model(**model or {}) for _ in range(pipeline * data)]

    def one(transport: ThreadTransport) -> Ran:
        made: list[torch.optim.Optimizer] = []

        def remembered(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
            made.append(adamw(parameters))
            return made[0]

        engine = make_engine(
            models[transport.rank], cross_entropy, transport, schedule=schedule, pipeline=pipeline, data=data,
            count=schedule.microbatches, optimizer=remembered, **options,
        )  # fmt: skip
        steps = []
        for number, batch in enumerate(make_batches()):
            if falling:
                made[0].param_groups[0]["lr"] = 3e-2 / (1 + number)
            steps += engine.submit(part_of(batch, transport, pipeline, data, schedule))
        engine.drain()
        weights = {k: v.clone() for s in engine.stages.values() for k, v in s.global_state().items()}
        return [(step.loss, step.loss_scale) for step in steps], weights, list(engine.taken_back)

    return run_ranks(pipeline * data, one)


def named(name: str, ranks: int, count: int = COUNT) -> Schedule:
    schedule = registry.build(name, ranks=ranks, microbatches=count)
    assert isinstance(schedule, Schedule)
    return schedule


def assert_same(
    found: list[Ran],
    expected: list[Ran],
) -> None:
    for (losses, weights, _), (other_losses, other_weights, _) in zip(found, expected, strict=True):
        assert losses == other_losses
        assert all(torch.equal(weights[name], other_weights[name]) for name in other_weights)


@pytest.mark.parametrize(("name", "clip_norm"), [("1f1b", 1.0), ("naive", 2.0), ("1f1b", None)])
def test_clipped_steps_are_taken_back_bitwise(name: str, clip_norm: float | None) -> None:
    without_dropout: dict[str, Any] = {"dropout": 0.0}
    found = run(named(name, 3), model=without_dropout, clip_norm=clip_norm, post_validation=True)
    expected = make_model(**without_dropout)
    losses = train(expected, cross_entropy, make_batches(), count=COUNT, optimizer=adamw, clip_norm=clip_norm)
    for own_losses, own_weights, taken_back in found:
        assert [loss for loss, _ in own_losses] == losses
        assert all(torch.equal(value, expected.state_dict()[key]) for key, value in own_weights.items())
        assert bool(taken_back) == (clip_norm is not None)
        assert all(not step.skipped and present(step.grad_norm) > present(clip_norm) for step in taken_back)
    if clip_norm is not None:
        assert len(found[0][2]) < STEPS or clip_norm < 1.0, "some steps stay as they are"


def test_two_chunks_on_a_rank(tmp_path: Path) -> None:
    schedule = from_file(tmp_path)
    found = run(schedule, clip_norm=1.0, post_validation=True, falling=True)
    assert_same(found, run(schedule, clip_norm=1.0, falling=True))
    assert found[0][2]


def test_replicas_take_the_same_steps_back() -> None:
    found = run(named("1f1b", 2, 2), data=2, clip_norm=1.0, post_validation=True)
    assert_same(found, run(named("1f1b", 2, 2), data=2, clip_norm=1.0))
    assert found[0][2]
    assert all(taken_back == found[0][2] for _, _, taken_back in found)


@pytest.mark.parametrize("layer", [0, 5])
def test_an_overflow_on_each_rank_in_turn_is_skipped_bitwise(layer: int) -> None:
    options: dict[str, Any] = {"model": {"overflow_at": layer}, "skip_nonfinite": True, "clip_norm": 5.0}
    found = run(named("1f1b", 3), post_validation=True, **options)
    assert_same(found, run(named("1f1b", 3), **options))
    assert all([step.step for step in taken_back if step.skipped] == [2] for _, _, taken_back in found)


def test_the_loss_scale_is_the_one_of_waiting_ranks() -> None:
    """Rank 1 has stepped when it hears of the overflow, and its scale has grown by then."""
    scaling = LossScaling(initial_scale=2.0**8, growth_interval=3, samples=BATCH)
    options: dict[str, Any] = {
        "model": {"overflow_at": 0},
        "scaling": scaling,
        "dtype": torch.float16,
        "masters": True,
    }
    found = run(named("1f1b", 2), post_validation=True, **options)
    assert_same(found, run(named("1f1b", 2), **options))
    assert all([step.step for step in taken_back] == [2] for _, _, taken_back in found)


class SteepWhereNegative(nn.Module):
    """A gradient that is not finite, always at the same inputs, so that it is there again when a step is replayed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and bool((x[:, 0] < -0.85).any()):  # after a tanh
            x = x.clone()
            x.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]  # the library's
        return x


def test_what_is_not_finite_ends_the_run_and_is_named() -> None:
    torch.manual_seed(5)
    steep = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), SteepWhereNegative())
    with pytest.raises(RunFailedError, match=r"a gradient is not finite; first not finite: .*on stage 1"):
        run(named("1f1b", 3), model={"middle": steep}, post_validation=True)


def test_weights_are_final_after_a_drain() -> None:
    """The last step is clipped, and nothing comes after it."""
    found = run(named("gpipe", 2), clip_norm=0.01, post_validation=True)
    assert_same(found, run(named("gpipe", 2), clip_norm=0.01))
    assert found[0][2][-1].step == STEPS - 1


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("gpipe", 3), ("naive", 2)])
def test_beginnings_are_a_consistent_cut_of_forwards(name: str, ranks: int) -> None:
    program = lower(named(name, ranks, 6))
    found = speculation(program)
    sent, received = [], []
    for rank, actions in enumerate(program.actions):
        beginning = actions[: found.lengths[rank]]
        assert all(action.op in (Op.F, Op.SEND, Op.RECV) for action in beginning)
        sent += [(rank, a.peer, a.stage, a.microbatch) for a in beginning if a.op is Op.SEND]
        received += [(a.peer, rank, a.stage - 1, a.microbatch) for a in beginning if a.op is Op.RECV]
        received += [(a.peer, rank, a.stage - 1, a.microbatch) for a in found.in_flight[rank]]
    assert sorted(sent) == sorted(received), "what was sent is received: in the beginning, or afterwards to be dropped"
    assert found.lengths[0] > 0
