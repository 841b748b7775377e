"""A link that is slowed down on purpose."""

from __future__ import annotations

import time
from functools import partial

import torch
from layouts import make_engine
from torch import nn

from runner.engine.transport.base import Channel
from runner.engine.transport.delayed import DelayedTransport
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.window import StepBatch


def test_messages_take_their_length_one_after_the_other_and_then_the_delay() -> None:
    """Three messages of 0.1 s each on a link of 0.2 s: there after 0.3, 0.4 and 0.5 s, in order; sends do not wait."""

    def rank(inner: ThreadTransport) -> list[float]:
        transport = DelayedTransport(inner, delay_seconds=0.2, bytes_per_second=4000)
        times = [time.perf_counter()]
        if transport.rank == 0:
            handles = [transport.send(torch.full((100,), float(i)), 1, Channel.ACTIVATION) for i in range(3)]
            assert not any(handle.is_completed() for handle in handles)
            times.append(time.perf_counter())
            for handle in handles:
                handle.wait()
        else:
            buffers = [torch.empty(100) for _ in range(3)]
            for i, handle in enumerate([transport.receive(b, 0, Channel.ACTIVATION) for b in buffers]):
                handle.wait()
                times.append(time.perf_counter())
                assert buffers[i].eq(i).all()
        return times

    (start, sent), (_, *received) = run_ranks(2, rank)
    assert sent - start < 0.1
    after = [at - start for at in received]
    assert all(due <= at < due + 0.25 for at, due in zip(after, (0.3, 0.4, 0.5), strict=True)), after


def test_each_direction_and_peer_is_a_link_of_its_own() -> None:
    def rank(inner: ThreadTransport) -> float:
        transport = DelayedTransport(inner, delay_seconds=0.15, bytes_per_second=None)
        start = time.perf_counter()
        for peer in {0, 1, 2} - {transport.rank}:
            transport.send(torch.ones(1 << 16), peer, Channel.GRADIENT)
        for peer in {0, 1, 2} - {transport.rank}:
            transport.receive(torch.empty(1 << 16), peer, Channel.GRADIENT).wait()
        return time.perf_counter() - start

    assert all(0.14 <= seconds < 0.3 for seconds in run_ranks(3, rank))


def test_sums_and_gatherings_take_their_rings_messages() -> None:
    """400 bytes over 2 ranks at 4000 bytes a second: 0.1 s and two delays to sum, 0.1 s and one to gather, in turn."""

    def rank(inner: ThreadTransport) -> tuple[float, float, bool, float]:
        transport = DelayedTransport(inner, delay_seconds=0.05, bytes_per_second=4000)
        value = torch.full((100,), float(transport.rank + 1))
        start = time.perf_counter()
        handle = transport.all_reduce(value, (0, 1))
        gathering = transport.start_all_gather(torch.ones(100), (0, 1))
        early = handle.is_completed()
        handle.wait()
        summed = time.perf_counter() - start
        assert len(gathering.wait()) == 2
        return summed, time.perf_counter() - start, early, float(value[0])

    for summed, gathered, early, value in run_ranks(2, rank):
        assert (early, value) == (False, 3.0)
        assert summed >= 0.199
        assert gathered >= 0.249


def test_sends_hold_no_compute_up() -> None:
    """GPipe on two ranks that compute next to nothing: there and back once, however many gradients are under way."""
    delay = 0.2

    def rank(inner: ThreadTransport) -> list[float]:
        transport = DelayedTransport(inner, delay_seconds=delay, bytes_per_second=None)
        engine = make_engine(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            nn.functional.mse_loss,
            transport,
            schedule="gpipe",
            pipeline=2,
            data=1,
            count=4,
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )
        batch = torch.ones(8, 4)
        for _ in range(3):
            engine.submit(StepBatch(batch if transport.rank == 0 else None, batch if transport.rank == 1 else None, 8))
        engine.drain()
        return [step.end - step.start for step in engine.timeline.steps]

    of_first_rank, _ = run_ranks(2, rank)
    assert 2 * delay <= min(of_first_rank[1:]) < 2.8 * delay
