"""Stages on several ranks of one pipeline give what one process gives, and stay equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from reference import train
from test_equality import make_batches
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.options import FinishedStep
from runner.engine.rank_view import RankView
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.copies import running_statistics_problems
from runner.model.layers import build_stage, layers_of
from runner.plan.layout.topology import Topology
from runner.schedule.catalogue import registry
from runner.schedule.values import Schedule

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
Batches = Sequence[tuple[Tensor, Tensor]]
State = dict[str, Tensor]


def make_model(num_blocks: int = 7) -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 5))


def train_twins(
    make: Callable[[], nn.Module], batches: Batches, schedule: Schedule, **options: Any
) -> tuple[list[list[FinishedStep]], State]:
    """Each rank's steps, and the weights, of which all copies must be equal."""
    models = [make() for _ in range(schedule.ranks)]
    layout: dict[str, Any] = {
        "schedule": schedule, "pipeline": schedule.ranks, "data": 1, "count": schedule.microbatches,
    }  # fmt: skip

    def run(transport: ThreadTransport) -> tuple[list[FinishedStep], dict[int, State]]:
        engine = make_engine(models[transport.rank], functional.cross_entropy, transport, **layout, **options)
        steps = [
            step for batch in batches for step in engine.submit(part_of(batch, transport, schedule.ranks, 1, schedule))
        ]
        engine.drain()
        return steps, {stage: module.global_state() for stage, module in engine.stages.items()}

    found = run_ranks(schedule.ranks, run)
    weights: State = {}
    for stage in range(schedule.stages):
        first, *others = [copies[stage] for _, copies in found if stage in copies]
        assert len(others) == len(schedule.copies_of(stage)) - 1
        for other in others:
            assert [name for name in first if not torch.equal(first[name], other[name])] == []
        weights |= first
    return [steps for steps, _ in found], weights


@pytest.mark.parametrize(
    ("name", "variant", "ranks", "clip_norm"),
    [
        ("gems", None, 2, None),
        ("chimera", "halving", 2, None),
        ("chimera", "doubling", 4, 0.05),
        ("dualpipe", None, 2, 0.05),
        ("bitpipe", None, 2, 0.05),
    ],
)
def test_the_sums_of_both_directions(name: str, variant: str | None, ranks: int, clip_norm: float | None) -> None:
    """Bitwise the reference that sums what goes down, then what goes up; to rounding the plain loop."""
    schedule = registry.build(name, ranks=ranks, microbatches=2 * ranks, variant=variant)
    batches = make_batches(6 * ranks - 1)
    options: dict[str, Any] = {"clip_norm": clip_norm, "optimizer": adamw}
    steps, weights = train_twins(make_model, batches, schedule, **options)
    states = []
    for pipelines in (2, 1):
        model = make_model()
        ways: dict[str, Any] = {"count": schedule.microbatches, "pipelines": pipelines, "joined": schedule.joined}
        losses = train(model, functional.cross_entropy, batches, **ways, **options)
        states.append((losses, model.state_dict()))
    assert [[step.loss for step in each] for each in steps] == [states[0][0]] * ranks
    assert [key for key, value in states[0][1].items() if not torch.equal(weights[key], value)] == []
    torch.testing.assert_close(states[0][0], states[1][0], rtol=1e-5, atol=0)


def test_copies_whose_forwards_and_backwards_are_on_other_ranks_are_equal() -> None:
    """The middle one of five stages has one copy."""
    train_twins(make_model, make_batches(23), registry.build("pipefb", ranks=5, microbatches=5), optimizer=adamw)


def test_running_statistics_have_no_twins() -> None:
    view = RankView.of(Topology.grid(2, 1, placement=((0, 1), (1, 0))), 1, microbatches=2)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    stages = {0: build_stage(layers_of(model, 0), 0, 0), 1: build_stage(layers_of(model, 0), 1, 1)}
    (problem,) = running_statistics_problems(view, stages, "chimera")
    assert problem.line().startswith(
        "schedule.name = chimera: must be a schedule of one pipeline, because layer 1 keeps running statistics."
    )
    alone = RankView.of(Topology.grid(2, 1), 1, microbatches=2)
    assert running_statistics_problems(alone, {1: stages[1]}, "1f1b") == []
