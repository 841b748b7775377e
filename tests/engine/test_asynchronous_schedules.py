"""Schedules whose stages read different versions of their weights, against their recurrences in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from covering import covering
from layouts import make_engine, part_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.schedule import build
from runner.schedule.checking.program import check_program
from runner.schedule.checking.schedule import check
from runner.schedule.lowering.program import lower
from runner.schedule.values import Schedule

WIDTH = 6
STEPS = 12
Batches = Sequence[tuple[Tensor, Tensor]]
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.05)
MOMENTUM: Optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM: Optimizer = partial(torch.optim.Adam, lr=0.01)


def lags_of(name: str, ranks: int, count: int) -> list[int]:
    """How many micro-batches earlier the newest gradient is that a stage's forward knows, as the papers say it."""
    return {
        "ampnet": [ranks - 1 - stage for stage in range(ranks)],
        "pipedream": [ranks - 1 - stage for stage in range(ranks)],
        "pipedream_vsync": [ranks - 1] * ranks,
        "pipedream_2bw": [count] * ranks,
        "wpipe": [count] * ranks + [0] * ranks,
    }[name]


def make_model(layers: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers))
    )


def make_batches(samples: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(steps):
        inputs, targets = torch.randn(2, samples, WIDTH, generator=generator)
        batches.append((inputs, targets))
    return batches


def recurrence(
    batches: Batches, lags: Sequence[int], *, layers: int, count: int, optimizer: Optimizer, newest: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights if the forward of micro-batch m reads stage s after (m - lag of s) // count steps.

    Args:
        newest: whether a backward reads the weights after m // count steps, with the activations of its forward.
    """
    model = make_model(layers)
    made = optimizer(list(model.parameters()))
    stage_of = {name: int(name.split(".")[0]) * len(lags) // layers for name, _ in model.named_parameters()}
    versions = [{name: value.detach().clone() for name, value in model.named_parameters()}]
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        total, weight = torch.zeros((), dtype=torch.float64), 0
        for number, (given, wanted) in enumerate(
            zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        ):
            read = {
                name: versions[max(0, (step * count + number - lags[stage]) // count)][name].clone().requires_grad_()
                for name, stage in stage_of.items()
            }
            loss = functional.mse_loss(functional_call(model, read, (given,)), wanted) * len(given)
            if newest:
                for name, value in read.items():
                    value.data.copy_(versions[step][name])
            loss.backward()  # type: ignore[no-untyped-call]  # the library's
            for name, parameter in model.named_parameters():
                gradient = read[name].grad
                assert gradient is not None
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            total, weight = total + loss.detach().double(), weight + len(given)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(weight)
        made.step()
        made.zero_grad()
        versions.append({name: value.detach().clone() for name, value in model.named_parameters()})
        losses.append(float(total / weight))
    return losses, versions[-1]


def train(
    batches: Batches,
    schedule: Schedule,
    *,
    layers: int,
    count: int,
    optimizer: Optimizer,
    drained_after: Sequence[int] = (),
) -> tuple[list[list[float]], dict[str, Tensor], list[int]]:
    """Losses by rank, the weights by global name, and the most versions that any stage has held, by stage."""
    ranks = schedule.ranks
    models = [make_model(layers) for _ in range(ranks)]

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, Tensor], dict[int, int]]:
        engine = make_engine(
            models[transport.rank],
            functional.mse_loss,
            transport,
            schedule=schedule,
            pipeline=ranks,
            data=1,
            count=count,
            optimizer=optimizer,
        )
        found, held = [], dict.fromkeys(engine.stages, 1)
        for step, batch in enumerate(batches):
            found += engine.submit(part_of(batch, transport, ranks, 1, schedule))
            held |= {stage: max(held[stage], len(store.versions)) for stage, store in engine.stores.items()}
            if step in drained_after:
                found += engine.drain()
        found += engine.drain()
        assert not engine._rank.windows
        assert [step.step for step in found] == list(range(len(batches)))
        weights = {name: value for stage in engine.stages.values() for name, value in stage.global_state().items()}
        return [step.loss for step in found], weights, held

    results = run_ranks(ranks, run)
    weights = {name: value for _, state, _ in results for name, value in state.items()}
    versions = {stage: count for _, _, held in results for stage, count in held.items()}
    return [losses for losses, _, _ in results], weights, [versions[stage] for stage in sorted(versions)]


CASES = [
    (name, ranks, count)
    for name in ("ampnet", "pipedream", "pipedream_vsync")
    for ranks, count in ((2, 1), (4, 1), (4, 2), (3, 5))
] + [("wpipe", 2, 2), ("wpipe", 2, 3), ("wpipe", 4, 6)]


@pytest.mark.parametrize(("case", "optimizer"), covering({"case": CASES, "of": [SGD, MOMENTUM, ADAM]}, strength=1))
def test_a_schedule_is_its_recurrence(case: tuple[str, int, int], optimizer: Optimizer) -> None:
    name, ranks, count = case
    schedule = build(name, ranks=ranks, microbatches=count)
    layers, lags, newest = schedule.stages, lags_of(name, ranks, count), name == "ampnet"
    batches = make_batches(2 * count)
    losses, weights, held = train(batches, schedule, layers=layers, count=count, optimizer=optimizer)
    expected, values = recurrence(batches, lags, layers=layers, count=count, optimizer=optimizer, newest=newest)
    assert losses == [expected] * ranks
    assert [key for key, value in values.items() if not torch.equal(weights[key], value)] == []
    assert held == [1 if newest else 1 - (-lag // count) for lag in lags]


@pytest.mark.parametrize("name", ["ampnet", "pipedream", "pipedream_vsync", "wpipe"])
def test_the_recurrences_differ(name: str) -> None:
    """The oracle would be of no use if other lags gave the same bits."""
    ranks, count = 3, 4
    batches = make_batches(4, steps=4)
    lags = lags_of(name, ranks, count)
    options = {"layers": len(lags), "count": count, "optimizer": SGD}
    cases = ((lags, name == "ampnet"), (lags, name != "ampnet"), ([0] * len(lags), False))
    found = [recurrence(batches, each, newest=newest, **options)[0][-1] for each, newest in cases]  # type: ignore[arg-type]
    assert len(set(found)) == 3


@pytest.mark.parametrize("name", ["pipedream", "pipedream_vsync", "wpipe"])
def test_draining_changes_no_bit_where_older_versions_are_kept(name: str) -> None:
    schedule = build(name, ranks=3, microbatches=4)
    batches = make_batches(8, steps=8)
    options = {"layers": schedule.stages, "count": 4, "optimizer": MOMENTUM}
    whole = train(batches, schedule, **options)  # type: ignore[arg-type]
    drained = train(batches, schedule, **options, drained_after=(0, 2, 3))  # type: ignore[arg-type]
    assert drained[0] == whole[0]
    assert [key for key, value in whole[1].items() if not torch.equal(drained[1][key], value)] == []


def test_without_older_versions_a_drained_pipeline_begins_anew() -> None:
    """Both halves are runs of their own: the second begins with the weights of the first, and no forward is behind."""
    schedule, cut = build("ampnet", ranks=3, microbatches=1), 5
    batches = make_batches(4, steps=10)
    drained, weights, _ = train(batches, schedule, layers=3, count=1, optimizer=SGD, drained_after=(cut - 1,))
    lags = lags_of("ampnet", 3, 1)
    first, _ = recurrence(batches[:cut], lags, layers=3, count=1, optimizer=SGD, newest=True)
    assert drained[0][:cut] == first
    whole, _, _ = train(batches, schedule, layers=3, count=1, optimizer=SGD)
    assert whole[0][:cut] == first
    assert whole[0] != drained[0]


@pytest.mark.parametrize(("name", "ranks", "count"), CASES)
def test_the_order_is_legal(name: str, ranks: int, count: int) -> None:
    schedule = build(name, ranks=ranks, microbatches=count)
    assert check(schedule) == []
    assert check_program(lower(schedule)) == []
