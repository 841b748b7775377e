"""Stages on several ranks of one pipeline give what one process gives, and stay equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from covering import covering
from layouts import make_engine, part_of, train_in_threads
from reference import train
from small_models import Unembed, token_loss
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.context import RankView
from runner.engine.options import FinishedStep
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.copies import running_statistics_problems
from runner.errors import RunFailedError
from runner.model.layers import build_stage, layers_of
from runner.model.ties import find_ties, with_all_names
from runner.plan.layout.topology import Topology
from runner.schedule.catalogue import registry
from runner.schedule.values import Schedule

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
Batches = Sequence[tuple[Tensor, Tensor]]
State = dict[str, Tensor]


def make_model(num_blocks: int = 14) -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 5))


def make_tied() -> nn.Sequential:
    torch.manual_seed(7)
    embedding = nn.Embedding(11, 6)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(embedding, *blocks, Unembed(embedding.get_parameter("weight")))


def token_batches(batch: int) -> Batches:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, 11, (2, batch, 5), generator=generator)) for _ in range(4)]


def make_batches(batch: int, steps: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 6, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(steps)
    ]


def train_twins(
    make: Callable[[], nn.Module], loss: Callable[..., Any], batches: Batches, schedule: Schedule, **options: Any
) -> list[tuple[list[FinishedStep], dict[int, State]]]:
    """Each rank's steps, and its copy of each of its stages."""
    models = [make() for _ in range(schedule.ranks)]
    layout: dict[str, Any] = {
        "schedule": schedule,
        "pipeline": schedule.ranks,
        "data": 1,
        "count": schedule.microbatches,
    }

    def run(transport: ThreadTransport) -> tuple[list[FinishedStep], dict[int, State]]:
        engine = make_engine(models[transport.rank], loss, transport, **layout, **options)
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


NAMES = ["gems", "chimera", "chimera doubling", "chimera halving", "dualpipe", "bitpipe"]
MATRIX: dict[str, list[Any]] = {"name": NAMES, "ranks": [2, 4], "uneven": [False, True], "clip_norm": [None, 0.05]}


@pytest.mark.parametrize(list(MATRIX), covering(MATRIX, strength=1))
def test_the_sums_of_both_directions(name: str, ranks: int, uneven: bool, clip_norm: float | None) -> None:
    """Bitwise the reference that sums what goes down, then what goes up; to rounding the plain loop."""
    name, *variant = name.split()
    schedule = registry.build(name, ranks=ranks, microbatches=2 * ranks, variant=variant[0] if variant else None)
    batches = make_batches(6 * ranks - 1 if uneven else 4 * ranks)
    options: dict[str, Any] = {"clip_norm": clip_norm, "optimizer": adamw}
    results = train_twins(make_model, functional.cross_entropy, batches, schedule, **options)
    states = []
    for pipelines in (2, 1):
        model = make_model()
        count = schedule.microbatches
        ways: dict[str, Any] = {"count": count, "pipelines": pipelines, "joined": schedule.joined}
        losses = train(model, functional.cross_entropy, batches, **ways, **options)
        states.append((losses, model.state_dict()))
    assert_twins_are_equal([copies for _, copies in results], schedule)
    weights = {name: value for _, copies in results for state in copies.values() for name, value in state.items()}
    for steps, _ in results:
        assert [step.loss for step in steps] == states[0][0]
    assert [key for key, value in states[0][1].items() if not torch.equal(weights[key], value)] == []
    torch.testing.assert_close(states[0][0], states[1][0], rtol=1e-5, atol=0)


def test_twins_stay_equal_over_fifty_steps() -> None:
    """Two pipelines down and two up, with decaying moments and clipping: the reference sums pipeline by pipeline."""
    schedule = registry.build("chimera", ranks=4, microbatches=8, pipes=4)
    batches = make_batches(13, steps=50)
    options: dict[str, Any] = {"clip_norm": 0.2, "optimizer": adamw}
    make_small = partial(make_model, 2)
    results = train_twins(make_small, functional.cross_entropy, batches, schedule, twin_check_every=10, **options)
    assert_twins_are_equal([copies for _, copies in results], schedule)
    model = make_small()
    losses = train(model, functional.cross_entropy, batches, count=8, pipelines=4, **options)
    for steps, _ in results:
        torch.testing.assert_close([step.loss for step in steps], losses, rtol=1e-4, atol=0)


ODD: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gems": (3, 5, {}),
    "chimera": (4, 4, {"pipes": 4}),
    "dualpipe": (2, 6, {}),
}


@pytest.mark.parametrize("name", ODD)
def test_tied_weights_and_other_shapes(name: str) -> None:
    """The first and the last stage share a weight; the middle rank of three holds its stage for both directions."""
    ranks, microbatches, variant = ODD[name]
    schedule = registry.build(name, ranks=ranks, microbatches=microbatches, **variant)
    batches = token_batches(2 * microbatches - 1)
    options: dict[str, Any] = {"clip_norm": 0.1, "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    results = train_twins(make_tied, token_loss, batches, schedule, **options)
    assert_twins_are_equal([copies for _, copies in results], schedule)
    model = make_tied()
    losses = train(model, token_loss, batches, count=microbatches, **options)
    weights = {key: value for _, copies in results for state in copies.values() for key, value in state.items()}
    whole = with_all_names(weights, find_ties(layers_of(make_tied(), 0)))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(whole[key], value, rtol=1e-4, atol=1e-6)
    for steps, _ in results:
        torch.testing.assert_close([step.loss for step in steps], losses, rtol=1e-5, atol=0)


def test_replicas_of_twins() -> None:
    schedule = registry.build("chimera", ranks=2, microbatches=4)
    batches = make_batches(19)
    options: dict[str, Any] = {"count": 4, "clip_norm": 0.1, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    losses, weights = train_in_threads(
        make_model, functional.cross_entropy, batches, schedule=schedule, pipeline=2, data=2, **options
    )
    model = make_model()
    expected = train(model, functional.cross_entropy, batches, replicas=2, **options)
    torch.testing.assert_close(losses[3], expected, rtol=1e-5, atol=0)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-6)


def test_validation_goes_one_way_and_counts_every_sample_once() -> None:
    schedule = registry.build("bitpipe", ranks=2, microbatches=4)
    (batch,) = make_batches(7, steps=1)
    models = [make_model() for _ in range(2)]

    def run(transport: ThreadTransport) -> tuple[float, float]:
        layout: dict[str, Any] = {"schedule": schedule, "pipeline": 2, "data": 1, "count": 4, "optimizer": adamw}
        engine = make_engine(models[transport.rank], functional.cross_entropy, transport, **layout)
        return engine.evaluate(part_of(batch, transport, 2, 1, schedule))

    expected = float(functional.cross_entropy(make_model()(batch[0]), batch[1], reduction="sum").detach())
    for total, weight in run_ranks(2, run):
        assert total == pytest.approx(expected, rel=1e-5)
        assert weight == 7


def test_twins_that_differ_end_the_run() -> None:
    schedule = registry.build("chimera", ranks=2, microbatches=2)
    models = [make_model() for _ in range(2)]
    with torch.no_grad():
        models[1].get_parameter("0.bias")[3] += 1e-6
    layout: dict[str, Any] = {
        "schedule": schedule,
        "pipeline": 2,
        "data": 1,
        "count": 2,
        "optimizer": adamw,
        "twin_check_every": 2,
    }

    def run(transport: ThreadTransport) -> None:
        engine = make_engine(models[transport.rank], functional.cross_entropy, transport, **layout)
        first, second = make_batches(4, steps=2)
        engine.submit(part_of(first, transport, 2, 1, schedule))
        with pytest.raises(RunFailedError, match="step 2: the copies of 0.bias on ranks 0 and 1 differ"):
            engine.submit(part_of(second, transport, 2, 1, schedule))

    run_ranks(2, run)


def test_running_statistics_have_no_twins() -> None:
    view = RankView.of(Topology.grid(2, 1, placement=((0, 1), (1, 0))), 1, microbatches=2)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    stages = {0: build_stage(layers_of(model, 0), 0, 0), 1: build_stage(layers_of(model, 0), 1, 1)}
    (problem,) = running_statistics_problems(view, stages, "chimera")
    assert problem.line().startswith(
        "schedule.name = chimera: must be a schedule of one pipeline with running statistics (1.running_mean)."
    )
    alone = RankView.of(Topology.grid(2, 1), 1, microbatches=2)
    assert running_statistics_problems(alone, {1: stages[1]}, "1f1b") == []
