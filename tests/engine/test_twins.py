"""Stages on several ranks of one pipeline give what one process gives, and stay equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from covering import covering
from layouts import make_engine, part_of
from reference import train
from small_models import Unembed, token_loss
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.options import FinishedStep
from runner.engine.transport_threads import ThreadTransport, run_ranks
from runner.model.layers import layers_of
from runner.model.ties import find_ties, with_all_names
from runner.schedule import registry
from runner.schedule.values import Schedule

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
Batches = Sequence[tuple[Tensor, Tensor]]
State = dict[str, Tensor]


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12)) for _ in range(14)]
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 5))


def make_batches(batch: int, steps: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 6, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(steps)
    ]


def train_twins(
    make: Callable[[], nn.Module], loss: Callable, batches: Batches, schedule: Schedule, **options: object
) -> list[tuple[list[FinishedStep], dict[int, State]]]:
    """Each rank's steps, and its copy of each of its stages."""
    models = [make() for _ in range(schedule.ranks)]
    layout = {"schedule": schedule, "pipeline": schedule.ranks, "data": 1, "count": schedule.microbatches}

    def run(transport: ThreadTransport) -> tuple[list[FinishedStep], dict[int, State]]:
        engine = make_engine(models[transport.rank], loss, transport, **layout, **options)  # type: ignore[arg-type]
        steps = [
            step for batch in batches for step in engine.submit(part_of(batch, transport, schedule.ranks, 1, schedule))
        ]
        engine.drain()
        return steps, {stage: module.global_state() for stage, module in engine.stages.items()}

    return run_ranks(schedule.ranks, run)


def assert_twins_are_equal(copies: Sequence[dict[int, State]], schedule: Schedule) -> None:
    for stage in range(schedule.stages):
        first, *others = [held[stage] for held in copies if stage in held]
        assert len(others) == len(schedule.copies_of(stage)) - 1
        for other in others:
            assert [name for name in first if not torch.equal(first[name], other[name])] == []


NAMES = ["gems", "chimera", "dualpipe", "bitpipe"]
MATRIX = {"name": NAMES, "ranks": [2, 4], "uneven": [False, True], "clip_norm": [None, 0.05]}


@pytest.mark.parametrize(list(MATRIX), covering(MATRIX, strength=2))
def test_the_sums_of_both_directions(name: str, ranks: int, uneven: bool, clip_norm: float | None) -> None:
    """Bitwise the reference that sums what goes down, then what goes up; to rounding the plain loop."""
    schedule = registry.build(name, ranks=ranks, microbatches=2 * ranks)
    batches = make_batches(6 * ranks - 1 if uneven else 4 * ranks)
    options = {"clip_norm": clip_norm, "optimizer": adamw}
    results = train_twins(make_model, functional.cross_entropy, batches, schedule, **options)
    states = []
    for pipelines in (2, 1):
        model = make_model()
        count = schedule.microbatches
        losses = train(model, functional.cross_entropy, batches, count=count, pipelines=pipelines, **options)
        states.append((losses, model.state_dict()))
    assert_twins_are_equal([copies for _, copies in results], schedule)
    weights = {name: value for _, copies in results for state in copies.values() for name, value in state.items()}
    for steps, _ in results:
        assert [step.loss for step in steps] == states[0][0]
    assert [key for key, value in states[0][1].items() if not torch.equal(weights[key], value)] == []
    torch.testing.assert_close(states[0][0], states[1][0], rtol=1e-5, atol=0)
