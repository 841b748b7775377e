"""Versions of weights: which are kept, drained, saved and loaded, and how runs of overlapping windows end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from late_weights import SGD, Optimizer, make_batches, make_model, recurrence, train
from layouts import make_engine, part_of
from torch import nn
from torch.nn import functional

from runner.engine.engine import Engine
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.weights.store import WeightStore
from runner.errors import RunFailedError
from runner.model.layers import build_stage, layers_of
from runner.schedule import build
from runner.schedule.stream import streams_of
from runner.schedule.values import Action, Op, Schedule


def two_versions(ranks: int, count: int) -> Schedule:
    return build("pipedream_2bw", ranks=ranks, microbatches=count)


def engine_of(model: nn.Module, transport: ThreadTransport, schedule: Schedule, optimizer: Optimizer = SGD) -> Engine:
    return make_engine(
        model, functional.mse_loss, transport, schedule=schedule, pipeline=schedule.ranks, data=1,
        count=schedule.microbatches // schedule.windows, optimizer=optimizer,
    )  # fmt: skip


def on_ranks(schedule: Schedule, act: Callable[[Engine, Callable[[Any], Any]], Any]) -> list[Any]:
    """What ``act`` returns on each rank; it gets the engine, and a function that submits the rank's part of a batch."""
    models = [make_model() for _ in range(schedule.ranks)]

    def run(transport: ThreadTransport) -> Any:
        engine = engine_of(models[transport.rank], transport, schedule)
        return act(engine, lambda batch: engine.submit(part_of(batch, transport, schedule.ranks, 1, schedule)))

    return run_ranks(schedule.ranks, run)


def test_uneven_and_empty_microbatches_and_replicas() -> None:
    """Two replicas of 3 and 2 samples, of which 3 micro-batches are made: five of one sample in one process."""
    batches = make_batches(5, steps=6)
    found = train(batches, two_versions(2, 3), layers=4, count=3, optimizer=SGD, data=2)
    losses, weights = recurrence(batches, [5, 5], layers=4, count=5, optimizer=SGD)
    assert found.losses == [pytest.approx(losses)] * 4
    for name, value in weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=0, atol=1e-6)


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
    streams = streams_of(two_versions(4, 4))
    assert {len(stream.prologue) for stream in streams} == {1}
    assert {stream.overlap for stream in streams} == {1}
    first = streams[0].segment(3)
    assert first[0] == Action(Op.F, 0, 12)
    left = streams[0].drain(3)
    assert [action for action in left if action.op is Op.F] == []
    assert [action.microbatch for action in left] == [9, 10, 11]


def test_a_step_that_a_validation_ends_is_told() -> None:
    """A validation reads the newest weights, so that what is under way ends first: nobody forgets those steps."""
    schedule = two_versions(2, 4)

    def act(engine: Engine, submit: Callable[[Any], Any]) -> list[int]:
        found = []
        for batch in make_batches(8, steps=4):
            found += submit(batch)
            engine.evaluate(part_of(batch, engine.transport, 2, 1, schedule))
        return [step.step for step in [*found, *engine.drain()]]

    assert on_ranks(schedule, act) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(("asking", "at"), [(0, 2), (2, 3)])
def test_all_ranks_stop_after_the_same_batch(asking: int, at: int) -> None:
    """A rank that is asked to stop tells the others; whoever hears it first goes on until all have heard it."""

    def act(engine: Engine, submit: Callable[[Any], Any]) -> tuple[int, list[int]]:
        found, submitted = [], 0
        for step, batch in enumerate(make_batches(6, steps=12)):
            if engine.transport.rank == asking and step == at:
                engine.request_stop()
            found += submit(batch)
            submitted += 1
            if engine.stops:
                break
        return submitted, [step.step for step in [*found, *engine.drain()]]

    results = on_ranks(two_versions(3, 4), act)
    submitted = results[0][0]
    assert at < submitted <= at + 3
    assert results == [(submitted, list(range(submitted)))] * 3


@pytest.mark.parametrize("asking", [0, 2])
def test_all_ranks_save_once_after_the_same_batch(asking: int) -> None:
    """As they stop: whoever hears of it first goes on until all have heard it."""

    def act(engine: Engine, submit: Callable[[Any], Any]) -> list[int]:
        due = []
        for step, batch in enumerate(make_batches(6, steps=9)):
            if engine.transport.rank == asking and step == 2:
                engine.request_save()
            submit(batch)
            if engine.saves:
                due.append(step)
        engine.drain()
        return due

    results = on_ranks(two_versions(3, 4), act)
    (step,) = results[0]
    assert 2 <= step <= 5
    assert results == [[step]] * 3


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    """On the rank whose stage it is; the weights are those of the step before."""
    batches = make_batches(4, steps=2)
    batches[1][0][0, 0] = torch.nan

    def act(engine: Engine, submit: Callable[[Any], Any]) -> None:
        for batch in batches:
            submit(batch)
        engine.drain()

    with pytest.raises(RunFailedError, match="step 2: the loss is nan; the weights are those of the step before"):
        on_ranks(two_versions(2, 2), act)
