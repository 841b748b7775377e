"""A link that is slowed down on purpose, by a clock that stands still."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import make_engine
from torch import Tensor, nn

from runner.engine.transport import delayed
from runner.engine.transport.base import Channel, Handle, TransportAround
from runner.engine.transport.delayed import DelayedTransport
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.window import StepBatch


class Clock:
    """Stands at zero; who sleeps notes for how long, and sleeps until a gate opens, of which each thread has one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: dict[str, list[float]] = {}
        self.gates: dict[str, threading.Event] = {}
        monkeypatch.setattr(delayed, "time", SimpleNamespace(sleep=self.sleep, perf_counter=lambda: 0.0))

    def sleep(self, seconds: float) -> None:
        name = threading.current_thread().name
        self.slept.setdefault(name, []).append(seconds)
        if name in self.gates:
            assert self.gates[name].wait(120), "nobody opens the gate"


def test_messages_take_their_length_one_after_the_other_and_then_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three messages of 0.1 s each on a link of 0.2 s: there after 0.3, 0.4 and 0.5 s, in order; sends do not wait."""
    clock = Clock(monkeypatch)
    gate = clock.gates["link to rank 1"] = threading.Event()

    def rank(inner: ThreadTransport) -> None:
        transport = DelayedTransport(inner, delay_seconds=0.2, bytes_per_second=4000)
        if transport.rank == 0:
            handles = [transport.send(torch.full((100,), float(i)), 1, Channel.ACTIVATION) for i in range(3)]
            assert not any(handle.is_completed() for handle in handles)
            gate.set()
            for handle in handles:
                handle.wait()
            return
        buffers = [torch.empty(100) for _ in range(3)]
        for i, handle in enumerate([transport.receive(b, 0, Channel.ACTIVATION) for b in buffers]):
            handle.wait()
            assert buffers[i].eq(i).all()

    run_ranks(2, rank)
    assert clock.slept == {"link to rank 1": pytest.approx([0.3, 0.4, 0.5])}


def test_each_direction_and_peer_is_a_link_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def rank(inner: ThreadTransport) -> None:
        transport = DelayedTransport(inner, delay_seconds=0.15, bytes_per_second=1 << 20)
        for peer in {0, 1, 2} - {transport.rank}:
            transport.send(torch.ones(1 << 18), peer, Channel.GRADIENT)
        for peer in {0, 1, 2} - {transport.rank}:
            transport.receive(torch.empty(1 << 18), peer, Channel.GRADIENT).wait()

    run_ranks(3, rank)
    assert clock.slept == {f"link to rank {peer}": pytest.approx([1.15, 1.15]) for peer in range(3)}


def test_links_may_differ_and_a_ring_is_as_slow_as_its_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks: 400 bytes take 0.1 s within and 1.2 s between; a sum has 6 messages of 100 in turn."""
    clock = Clock(monkeypatch)

    def between(rank: int, peer: int) -> tuple[float, float | None]:
        return (0.0, 4000.0) if rank // 2 == peer // 2 else (0.2, 400.0)

    def rank(inner: ThreadTransport) -> None:
        transport = DelayedTransport(inner, between=between)
        transport.all_reduce(torch.ones(100), (0, 1, 2, 3)).wait()
        assert transport.rank or clock.slept[threading.current_thread().name] == pytest.approx(
            [6 * 100 / 400 + 6 * 0.2]
        )
        transport = DelayedTransport(inner, between=between)
        for peer in (transport.rank ^ 1, transport.rank ^ 2):
            transport.send(torch.ones(100), peer, Channel.GRADIENT)
            transport.receive(torch.empty(100), peer, Channel.GRADIENT).wait()

    run_ranks(4, rank)
    carried = [each for name, each in clock.slept.items() if name.startswith("link")]
    assert [sorted(each) == pytest.approx([0.1, 1.2]) for each in carried] == [True] * 4


def test_sums_and_gatherings_take_their_rings_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 bytes over 2 ranks at 4000 bytes a second: 0.1 s and two delays to sum, 0.1 s and one to gather, in turn."""
    clock = Clock(monkeypatch)

    def rank(inner: ThreadTransport) -> tuple[bool, float]:
        transport = DelayedTransport(inner, delay_seconds=0.05, bytes_per_second=4000)
        value = torch.full((100,), float(transport.rank + 1))
        handle = transport.all_reduce(value, (0, 1))
        gathering = transport.start_all_gather(torch.ones(100), (0, 1))
        early = handle.is_completed()
        handle.wait()
        assert len(gathering.wait()) == 2
        return early, float(value[0])

    assert run_ranks(2, rank) == [(False, 3.0)] * 2
    assert [each == pytest.approx([0.2, 0.25]) for each in clock.slept.values()] == [True] * 2


class _Opening(TransportAround):
    """Opens a gate when so many messages of a kind have been sent."""

    def __init__(self, inner: Any, gate: threading.Event, channel: Channel, count: int) -> None:
        super().__init__(inner)
        self._gate, self._channel, self._left = gate, channel, count

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        handle = super().send(tensor, peer, channel)
        self._left -= channel is self._channel
        if not self._left:
            self._gate.set()
        return handle


def test_sends_hold_no_compute_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPipe on two ranks: no message leaves before all four have been computed, in both directions."""
    clock = Clock(monkeypatch)
    channels = (Channel.ACTIVATION, Channel.GRADIENT)

    def rank(inner: ThreadTransport) -> float:
        own = inner.rank
        gate = clock.gates[f"link to rank {1 - own}"] = threading.Event()
        slow = DelayedTransport(inner, delay_seconds=0.2, bytes_per_second=None)
        transport = _Opening(slow, gate, channels[own], 4)
        engine = make_engine(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.functional.mse_loss, transport,
            schedule="gpipe", pipeline=2, data=1, count=4, optimizer=partial(torch.optim.SGD, lr=0.1),
        )  # fmt: skip
        batch = torch.ones(8, 4)
        (step,) = engine.submit(StepBatch(batch if own == 0 else None, batch if own == 1 else None, 8))
        engine.drain()
        return step.loss

    first, second = run_ranks(2, rank)
    assert first == second
