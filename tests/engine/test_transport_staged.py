"""Ranks that share a GPU exchange copies on the host; here the device is the CPU, too."""

from __future__ import annotations

import pytest
import torch

from runner.engine.transport.base import Channel
from runner.engine.transport.staged import StagedTransport
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.device import backend_of, device_of

CPU = torch.device("cpu")


def test_messages_are_copies_that_arrive_when_somebody_waits() -> None:
    def rank(inner: ThreadTransport) -> list[list[float]]:
        transport = StagedTransport(inner, CPU)
        if transport.rank == 0:
            value = torch.ones(2)
            handle = transport.send(value, 1, Channel.ACTIVATION)
            value.zero_()  # the message is a copy
            handle.wait()
            assert handle.is_completed()
            transport.send_bytes(b"told", 1, Channel.SPEC)
            return []
        buffer = torch.full((2,), 5.0)
        handle = transport.receive(buffer, 0, Channel.ACTIVATION)
        before = buffer.tolist()
        handle.wait()
        after = buffer.tolist()
        buffer.zero_()
        handle.wait()  # copies once
        assert transport.receive_bytes(0, Channel.SPEC) == b"told"
        return [before, after, buffer.tolist()]

    assert run_ranks(2, rank)[1] == [[5.0, 5.0], [1.0, 1.0], [0.0, 0.0]]


def test_sums_and_gatherings_are_made_on_the_host() -> None:
    def rank(inner: ThreadTransport) -> list[list[float]]:
        transport = StagedTransport(inner, CPU)
        value = torch.full((2,), float(transport.rank + 1))
        transport.all_reduce(value, (0, 1)).wait()
        own = torch.tensor([float(transport.rank)])
        started = transport.start_all_gather(own, (0, 1))
        return [value.tolist(), *(part.tolist() for part in [*started.wait(), *transport.all_gather(own, (0, 1))])]

    assert run_ranks(2, rank) == [[[3.0, 3.0], [0.0], [1.0], [0.0], [1.0]]] * 2


@pytest.mark.parametrize(("ranks", "gpus", "backend"), [(1, 1, "nccl"), (2, 2, "nccl"), (2, 1, "gloo"), (5, 2, "gloo")])
def test_ranks_share_gpus_in_turns(monkeypatch: pytest.MonkeyPatch, ranks: int, gpus: int, backend: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert [device_of("cuda", rank).index for rank in range(ranks)] == [rank % gpus for rank in range(ranks)]
    assert backend_of("cuda") == backend
    assert backend_of("cpu") == "gloo"
    assert device_of("cpu", 3) == CPU
