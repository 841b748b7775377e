"""Asynchronous schedules against their recurrence, as a plain loop: the bits of every loss and weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.weights.store import WeightStore
from runner.errors import RunFailedError
from runner.model.layers import build_stage, layers_of
from runner.schedule import build
from runner.schedule.stream import streams_of
from runner.schedule.values import Action, Op

WIDTH = 6
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.05)
MOMENTUM: Optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM: Optimizer = partial(torch.optim.Adam, lr=0.01)


def make_model(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers))
    )


def make_batches(samples: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(steps):
        inputs, targets = torch.randn(2, samples, WIDTH, generator=generator)
        batches.append((inputs, targets))
    return batches


def delayed_loop(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], *, count: int, optimizer: Optimizer, delay: int
) -> list[float]:
    """w(t+1) = w(t) - update(gradient at w(max(0, t - delay))): older weights say how the newest are updated."""
    made = optimizer(list(model.parameters()))
    versions = [copy.deepcopy(model.state_dict())]
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        newest = versions[-1]
        model.load_state_dict(versions[max(0, step - delay)])
        total, weight = torch.zeros((), dtype=torch.float64), 0
        for given, wanted in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True):
            loss = functional.mse_loss(model(given), wanted) * len(given)
            loss.backward()  # type: ignore[no-untyped-call]  # the library's
            total, weight = total + loss.detach().double(), weight + len(given)
        model.load_state_dict(newest)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(weight)
        made.step()
        made.zero_grad()
        versions.append(copy.deepcopy(model.state_dict()))
        losses.append(float(total / weight))
    return losses


def train(
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    ranks: int,
    count: int,
    optimizer: Optimizer,
    data: int = 1,
    drained_after: Sequence[int] = (),
    layers: int = 4,
) -> tuple[list[list[float]], dict[str, Tensor], list[tuple[int, ...]]]:
    """Losses by rank, the weights by global name, and the versions that each rank held after its last step."""
    schedule = build("pipedream_2bw", ranks=ranks, microbatches=count)
    models = [make_model(layers) for _ in range(ranks * data)]

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, Tensor], tuple[int, ...]]:
        engine = make_engine(
            models[transport.rank],
            functional.mse_loss,
            transport,
            schedule=schedule,
            pipeline=ranks,
            data=data,
            count=count,
            optimizer=optimizer,
        )
        found = []
        for step, batch in enumerate(batches):
            found += engine.submit(part_of(batch, transport, ranks, data, schedule))
            assert all(len(store.versions) <= 2 for store in engine.stores.values())
            if step in drained_after:
                found += engine.drain()
        found += engine.drain()
        assert not engine._rank.windows
        assert [step.step for step in found] == list(range(len(batches)))
        weights = {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}
        (store,) = engine.stores.values()
        return [step.loss for step in found], weights, store.versions

    results = run_ranks(ranks * data, run)
    weights: dict[str, Tensor] = {}
    for _, state, _ in results:
        weights.update(state)
    return [losses for losses, _, _ in results], weights, [versions for _, _, versions in results]


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (2, 6), (4, 4), (4, 6), (2, 1), (4, 3)])
def test_two_buffered_versions_are_a_delay_of_one(ranks: int, count: int, optimizer: Optimizer) -> None:
    batches = make_batches(2 * count, steps=12)
    losses, weights, versions = train(batches, ranks=ranks, count=count, optimizer=optimizer)
    model = make_model()
    expected = delayed_loop(model, batches, count=count, optimizer=optimizer, delay=1)
    assert losses == [expected] * ranks
    assert [name for name, value in model.state_dict().items() if not torch.equal(weights[name], value)] == []
    assert versions == [(11, 12)] * ranks, "the newest, and the one that the next window would read"


def test_the_delay_changes_the_result() -> None:
    """The oracle would be of no use if a delay of 0 gave the same bits."""
    batches = make_batches(8, steps=4)
    losses = [delayed_loop(make_model(), batches, count=4, optimizer=SGD, delay=delay) for delay in (0, 1)]
    assert losses[0][:2] != losses[1][:2] or losses[0][2:] != losses[1][2:]
    assert losses[0][-1] != losses[1][-1]


@pytest.mark.parametrize("drained_after", [(0,), (3,), (0, 1, 2, 3, 4, 5, 6), (2, 5)])
def test_draining_changes_no_bit(drained_after: tuple[int, ...]) -> None:
    """What is read is a matter of the step's number alone, whatever is drained in between."""
    batches = make_batches(9, steps=8)
    options: dict[str, Any] = {"ranks": 3, "count": 4, "optimizer": MOMENTUM}
    whole = train(batches, **options)
    drained = train(batches, **options, drained_after=drained_after)
    assert drained[0] == whole[0]
    assert [name for name, value in whole[1].items() if not torch.equal(drained[1][name], value)] == []


def test_uneven_and_empty_microbatches_and_replicas() -> None:
    batches = make_batches(5, steps=6)  # two replicas of 3 and 2 samples, of which 3 micro-batches are made
    losses, weights, _ = train(batches, ranks=2, count=3, optimizer=SGD, data=2)
    model = make_model()
    expected = delayed_loop_over_replicas(model, batches, count=3)
    assert losses == [pytest.approx(expected)] * 4
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


def delayed_loop_over_replicas(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], *, count: int
) -> list[float]:
    """The loop with the micro-batches of two replicas, one after the other."""
    made = SGD(list(model.parameters()))
    versions = [copy.deepcopy(model.state_dict())]
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        newest = versions[-1]
        model.load_state_dict(versions[max(0, step - 1)])
        total = 0.0
        for given, wanted in zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True):
            for one, other in zip(given.tensor_split(count), wanted.tensor_split(count), strict=True):
                if len(one):
                    loss = functional.mse_loss(model(one), other) * len(one)
                    loss.backward()  # type: ignore[no-untyped-call]  # the library's
                    total += loss.item()
        model.load_state_dict(newest)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(len(inputs))
        made.step()
        made.zero_grad()
        versions.append(copy.deepcopy(model.state_dict()))
        losses.append(total / len(inputs))
    return losses


def test_a_run_goes_on_with_the_versions_that_it_had() -> None:
    """Drained, saved, made anew and loaded: the bits of the run that went on."""
    batches, ranks, count, cut = make_batches(8, steps=8), 2, 4, 3
    schedule = build("pipedream_2bw", ranks=ranks, microbatches=count)
    whole, weights, _ = train(batches, ranks=ranks, count=count, optimizer=MOMENTUM)
    models = [make_model() for _ in range(ranks)]
    fresh = [make_model() for _ in range(ranks)]

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, Tensor]]:
        def engine_of(model: nn.Module) -> tuple[object, list[torch.optim.Optimizer]]:
            held: list[torch.optim.Optimizer] = []

            def remembered(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
                held.append(MOMENTUM(parameters))
                return held[0]

            made = make_engine(
                model, functional.mse_loss, transport,
                schedule=schedule, pipeline=ranks, data=1, count=count, optimizer=remembered,
            )  # fmt: skip
            return made, held

        first, (one,) = engine_of(models[transport.rank])
        found = []
        for batch in batches[:cut]:
            found += first.submit(part_of(batch, transport, ranks, 1, schedule))  # type: ignore[attr-defined]
        found += first.drain()  # type: ignore[attr-defined]
        second, (other,) = engine_of(fresh[transport.rank])
        for stage, module in second.stages.items():  # type: ignore[attr-defined]
            module.load_global_state({k: v.clone() for k, v in first.stages[stage].global_state().items()})  # type: ignore[attr-defined]
            second.stores[stage].load_older(cut, copy.deepcopy(first.stores[stage].older()))  # type: ignore[attr-defined]
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        second.start_at(cut)  # type: ignore[attr-defined]
        for batch in batches[cut:]:
            found += second.submit(part_of(batch, transport, ranks, 1, schedule))  # type: ignore[attr-defined]
        found += second.drain()  # type: ignore[attr-defined]
        state = {k: v for stage in second.stages.values() for k, v in stage.global_state().items()}  # type: ignore[attr-defined]
        return [step.loss for step in found], state

    for losses, state in run_ranks(ranks, run):
        assert losses == whole[0]
        assert [name for name, value in state.items() if not torch.equal(weights[name], value)] == []


def test_a_store_holds_what_is_still_to_be_read() -> None:
    (stage,) = [build_stage(layers_of(make_model(1), 0), 0, 0)]
    store = WeightStore(stage, lag=2, microbatches=1)
    first = [parameter.detach().clone() for parameter in stage.parameters()]
    for step in range(4):
        with store.leased(step), torch.no_grad():
            read = [parameter.detach().clone() for parameter in stage.parameters()]
        assert store.version_of(step) == max(0, step - 2)
        assert all(torch.equal(one, other + max(0, step - 2)) for one, other in zip(read, first, strict=True))
        store.before_step(step)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.add_(1.0)
        store.after_step()
        assert store.versions == tuple(range(max(0, step - 1), step + 2))


def test_a_stream_is_cut_where_a_rank_begins_a_window() -> None:
    schedule = build("pipedream_2bw", ranks=4, microbatches=4)
    streams = streams_of(schedule)
    assert {len(stream.prologue) for stream in streams} == {1}
    assert {stream.overlap for stream in streams} == {1}
    first = streams[0].segment(3)
    assert first[0] == Action(Op.F, 0, 12)
    left = streams[0].drain(3)
    assert [action for action in left if action.op is Op.F] == []
    assert [action.microbatch for action in left] == [9, 10, 11]


def test_a_step_that_a_validation_ends_is_told() -> None:
    """A validation reads the newest weights, so that what is under way ends first: nobody forgets those steps."""
    batches, ranks, count = make_batches(8, steps=4), 2, 4
    schedule = build("pipedream_2bw", ranks=ranks, microbatches=count)
    models = [make_model() for _ in range(ranks)]

    def run(transport: ThreadTransport) -> list[int]:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport,
            schedule=schedule, pipeline=ranks, data=1, count=count, optimizer=SGD,
        )  # fmt: skip
        found = []
        for batch in batches:
            part = part_of(batch, transport, ranks, 1, schedule)
            found += engine.submit(part)
            engine.evaluate(part)
        return [step.step for step in [*found, *engine.drain()]]

    assert run_ranks(ranks, run) == [[0, 1, 2, 3]] * ranks


@pytest.mark.parametrize(("asking", "at"), [(0, 2), (1, 1), (2, 3)])
def test_all_ranks_stop_after_the_same_batch(asking: int, at: int) -> None:
    """A rank that is asked to stop tells the others; whoever hears it first goes on until all have heard it."""
    batches, ranks, count = make_batches(6, steps=12), 3, 4
    schedule = build("pipedream_2bw", ranks=ranks, microbatches=count)
    models = [make_model() for _ in range(ranks)]

    def run(transport: ThreadTransport) -> tuple[int, list[int]]:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport,
            schedule=schedule, pipeline=ranks, data=1, count=count, optimizer=SGD,
        )  # fmt: skip
        found, submitted = [], 0
        for step, batch in enumerate(batches):
            if transport.rank == asking and step == at:
                engine.request_stop()
            found += engine.submit(part_of(batch, transport, ranks, 1, schedule))
            submitted += 1
            if engine.stops:
                break
        return submitted, [step.step for step in [*found, *engine.drain()]]

    results = run_ranks(ranks, run)
    assert len({submitted for submitted, _ in results}) == 1
    submitted = results[0][0]
    assert at < submitted <= at + 3
    assert all(steps == list(range(submitted)) for _, steps in results)


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    """On the rank whose stage it is; the weights are those of the step before."""
    batches, ranks, count = make_batches(4, steps=2), 2, 2
    batches[1][0][0, 0] = torch.nan
    schedule = build("pipedream_2bw", ranks=ranks, microbatches=count)
    models = [make_model() for _ in range(ranks)]

    def run(transport: ThreadTransport) -> None:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport,
            schedule=schedule, pipeline=ranks, data=1, count=count, optimizer=SGD,
        )  # fmt: skip
        for batch in batches:
            engine.submit(part_of(batch, transport, ranks, 1, schedule))
        engine.drain()

    with pytest.raises(RunFailedError, match="step 2: the loss is nan; the weights are those of the step before"):
        run_ranks(ranks, run)
