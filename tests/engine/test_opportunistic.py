"""Varuna's run-time rule: forwards go before backwards whose gradients are late, and the result stays the same."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from reference import train
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.transport.base import Channel, Handle, Transport, TransportAround
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.transport.watched import WatchedTransport
from runner.schedule.catalogue import registry
from runner.schedule.values import Schedule

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
Batches = Sequence[tuple[Tensor, Tensor]]


class Sent:
    """How many activations each rank has sent."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.changed = threading.Condition()


class GradientsAfterActivations(TransportAround):
    """Holds the rank's gradients back until the rank before has sent as many activations as a list says.

    In the schedule's own order that rank would wait for the gradient first, and the run would hang.

    Args:
        sent: activations that the ranks have sent.
        due: of the n-th gradient of a step: how many these must be.
    """

    def __init__(self, inner: Transport, sent: Sent, due: Sequence[int]) -> None:
        super().__init__(inner)
        self._sent, self._due, self._gradients = sent, due, 0

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        with self._sent.changed:
            if channel is Channel.ACTIVATION:
                self._sent.counts[self.rank] = self._sent.counts.get(self.rank, 0) + 1
                self._sent.changed.notify_all()
            if channel is Channel.GRADIENT:
                step, number = divmod(self._gradients, len(self._due))
                self._gradients += 1
                most = step * len(self._due) + self._due[number]
                in_time = self._sent.changed.wait_for(lambda: self._sent.counts.get(peer, 0) >= most, 120)
                assert in_time, "the rank before keeps to its order"
        return super().send(tensor, peer, channel)


class LateGradients(TransportAround):
    """Lets gradients wait for a time of chance."""

    def __init__(self, inner: Transport, seed: int) -> None:
        super().__init__(inner)
        self._chance = random.Random(seed)

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        if channel is Channel.GRADIENT:
            time.sleep(0.004 * self._chance.random())
        return super().send(tensor, peer, channel)


def varuna(ranks: int, microbatches: int, limit: int | None = None) -> Schedule:
    return registry.build("varuna", ranks=ranks, microbatches=microbatches, opportunistic=True, memory_limit=limit)


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.BatchNorm1d(12), nn.Linear(12, 5))


def make_batches(batch: int, steps: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 6, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(steps)
    ]


def run_engine(
    schedule: Schedule,
    batches: Batches,
    around: Mapping[int, Callable[[Transport], Transport]],
) -> tuple[list[list[float]], dict[str, Tensor], list[list[str]]]:
    """Losses and actions of the last step by rank, and the weights."""
    models = [make_model() for _ in range(schedule.ranks)]
    layout: dict[str, Any] = {
        "schedule": schedule, "pipeline": schedule.ranks, "data": 1, "count": schedule.microbatches,
    }  # fmt: skip

    def rank(inner: ThreadTransport) -> tuple[list[float], dict[str, Tensor], list[str]]:
        transport = around[inner.rank](inner) if inner.rank in around else inner
        engine = make_engine(
            models[inner.rank], functional.cross_entropy, transport, optimizer=adamw, clip_norm=0.05, **layout
        )
        steps = [
            step for batch in batches for step in engine.submit(part_of(batch, inner, schedule.ranks, 1, schedule))
        ]
        engine.drain()
        done = [f"{event.stage}{event.op}{event.microbatch}" for event in engine.timeline.events[-1][1]]
        state = {name: value for stage in engine.stages.values() for name, value in stage.global_state().items()}
        return [step.loss for step in steps], state, done

    results = run_ranks(schedule.ranks, rank)
    weights = {name: value for _, state, _ in results for name, value in state.items()}
    return [losses for losses, _, _ in results], weights, [done for _, _, done in results]


def assert_equals_one_process(
    losses: list[list[float]], weights: dict[str, Tensor], batches: Batches, count: int
) -> None:
    model = make_model()
    expected = train(model, functional.cross_entropy, batches, count=count, clip_norm=0.05, optimizer=adamw)
    assert all(rank == expected for rank in losses)
    state = model.state_dict()
    assert [name for name in state if not torch.equal(weights[name], state[name])] == []


def test_a_forward_goes_first_where_a_gradient_is_late() -> None:
    """The first gradient comes when all forwards have been sent, which the static order has later: else it hangs."""
    schedule = varuna(2, 4)
    static = [str(action) for action in schedule.actions[0]]
    assert static.index("0B0") < static.index("0F3")
    around = dict.fromkeys((0, 1), partial(GradientsAfterActivations, sent=Sent(), due=[4] * 4))
    losses, weights, done = run_engine(schedule, make_batches(12), around)
    assert [name for name in done[0] if "F" in name] == ["0F0", "0F1", "0F2", "0F3"]
    assert done[0].index("0F3") < done[0].index("0B0")
    assert_equals_one_process(losses, weights, make_batches(12), 4)


def test_any_order_of_arrivals_gives_what_one_process_gives() -> None:
    """Uneven micro-batches; batch norm's statistics and clipping besides."""
    schedule = varuna(4, 6, 3)
    around = {rank: partial(LateGradients, seed=rank) for rank in range(1, 4)}
    losses, weights, done = run_engine(schedule, make_batches(21), around)
    assert_equals_one_process(losses, weights, make_batches(21), 6)
    for row, actions in zip(done, schedule.actions, strict=True):
        assert sorted(row) == sorted(map(str, actions))


def test_a_rank_holds_no_more_than_its_limit() -> None:
    """With room for one micro-batch more the rule has no forward to take: the order stays, and late gradients wait."""
    schedule = varuna(2, 4, 1)
    _, _, done = run_engine(schedule, make_batches(8, steps=1), {1: partial(LateGradients, seed=0)})
    assert done[0] == [str(action) for action in schedule.actions[0]]


def test_a_watched_arrival_is_seen_and_its_error_raised_where_it_is_waited_for() -> None:
    def rank(inner: ThreadTransport) -> None:
        transport = WatchedTransport(inner)
        if transport.rank == 0:
            transport.receive(torch.empty(1), 1, Channel.HEADER).wait()
            transport.send(torch.ones(2), 1, Channel.GRADIENT)
            return
        buffer = torch.zeros(2)
        late = transport.receive(buffer, 0, Channel.GRADIENT)
        never = transport.receive(torch.zeros(3), 0, Channel.ACTIVATION)
        assert not late.is_completed()
        transport.send(torch.zeros(1), 0, Channel.HEADER)
        transport.wait_for_any([[never], [late]])
        assert late.is_completed()
        assert not never.is_completed()
        assert buffer.eq(1).all()
        inner.hub.abort()
        with pytest.raises(RuntimeError, match="another rank failed"):
            never.wait()

    run_ranks(2, rank)
