"""What the kernel counts on the wire is what a ring's formula says: Gloo's sums of gradients."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runner.engine.transport.counting import ring_bytes
from runner.engine.transport.wire import WireCount, sent_over_tcp, tcp_sockets
from runner.recipes.benchmarks.processes import run_ranks

_BYTES = 4 << 20


def test_a_connection_tells_what_it_has_sent() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname()) as here, listener.accept()[0] as there:
            assert {here.fileno(), there.fileno()} <= set(tcp_sockets())
            count = WireCount()
            with count.counting():
                here.sendall(bytes(5000))
            assert count.sent == 5000
            assert sent_over_tcp([here.fileno()]) == 5000
            assert sent_over_tcp([there.fileno()]) == 0
            assert there.recv(10) == bytes(10)  # nobody has closed it
    assert sent_over_tcp([10**6]) == 0


def _sums() -> Any:
    """As one rank: bytes that each of three sums has sent, by the kernel's count."""
    count, found = WireCount(), []
    for _ in range(3):
        before = count.sent
        value = torch.ones(_BYTES // 4)
        with count.counting():
            dist.all_reduce(value)
            dist.barrier()
        found.append(count.sent - before)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_sends_what_the_formula_says(ranks: int) -> None:
    for sent in run_ranks(ranks, _sums):
        assert sent == pytest.approx(ring_bytes(_BYTES, ranks), rel=0.02)
