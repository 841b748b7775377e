"""Two processes exchange messages over sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from runner.engine.transport.base import Channel
from runner.engine.transport.sockets import SocketTransport

SHORT, LONG = 16, 600_000  # elements: over a socket, and over Gloo


def _process(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    patient = SocketTransport([(0, 1)], timeout_seconds=60.0)
    for check in (exchange, kinds, send_without_waiting):
        check(patient, rank, 1 - rank)
        dist.barrier()
    longest_wait(SocketTransport([(0, 1)], timeout_seconds=60.0 if rank else 2.0), rank, 1 - rank)
    dist.destroy_process_group()


def exchange(transport: SocketTransport, rank: int, peer: int) -> None:
    """Both send short and long messages at once, before either receives: no order of waits is needed."""
    lengths = [SHORT, LONG, 0, LONG, SHORT, SHORT, LONG] * 2
    messages = [torch.full((length,), float(10 * rank + i)) for i, length in enumerate(lengths)]
    sent = [transport.send(message, peer, Channel.ACTIVATION) for message in messages]
    buffers = [torch.empty(length) for length in lengths]
    for group in (slice(0, 9), slice(9, None)):  # posted early, posted late
        handles = [transport.receive(buffer, peer, Channel.ACTIVATION) for buffer in buffers[group]]
        for handle in handles:
            handle.wait()
    for i, buffer in enumerate(buffers):
        assert torch.equal(buffer, torch.full_like(buffer, float(10 * peer + i)))
    for handle in sent:
        handle.wait()


def kinds(transport: SocketTransport, rank: int, peer: int) -> None:
    """Channels do not mix, and every kind of tensor arrives."""
    sent = {
        Channel.ACTIVATION: torch.tensor(3.5),
        Channel.GRADIENT: torch.ones(2, 3, dtype=torch.bfloat16),
        Channel.HEADER: torch.tensor([1 + 2j]),
        Channel.TOTALS: torch.tensor([True]),
    }
    for channel, tensor in sent.items():
        transport.send(tensor, peer, channel).wait()
    for channel, tensor in reversed(sent.items()):
        received = torch.empty_like(tensor)
        transport.receive(received, peer, channel).wait()
        assert torch.equal(received, tensor)
    gathered = transport.all_gather(torch.tensor([rank]), (0, 1))
    assert torch.cat(gathered).tolist() == [0, 1]
    told = transport.send_bytes(b"shapes", peer, Channel.SPEC)
    assert transport.receive_bytes(peer, Channel.SPEC) == b"shapes"
    for handle, _ in told:
        handle.wait()


def send_without_waiting(transport: SocketTransport, rank: int, peer: int) -> None:
    """The receiver does not receive before the sender has gone on."""
    count = 12
    if rank == 0:
        handles = [transport.send(torch.full((LONG,), float(i)), peer, Channel.ACTIVATION) for i in range(count)]
        transport.send(torch.ones(1), peer, Channel.HEADER).wait()
        for handle in handles:
            handle.wait()
    else:
        transport.receive(torch.empty(1), peer, Channel.HEADER).wait()
        for i in range(count):
            buffer = torch.empty(LONG)
            transport.receive(buffer, peer, Channel.ACTIVATION).wait()
            assert buffer[0] == buffer[-1] == i


def longest_wait(transport: SocketTransport, rank: int, peer: int) -> None:
    """A peer that says nothing, and then one that has ended."""
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 sent no message within the longest wait"):
            transport.receive(torch.empty(1), peer, Channel.ACTIVATION).wait()
        transport.send(torch.ones(1), peer, Channel.HEADER).wait()
        with pytest.raises(RuntimeError, match="rank 1 closed its connection"):
            transport.receive(torch.empty(SHORT), peer, Channel.GRADIENT).wait()
    else:
        transport.receive(torch.empty(1), peer, Channel.HEADER).wait()


@pytest.mark.costly
def test_two_processes(tmp_path: Path) -> None:
    spawn(_process, (str(tmp_path / "meeting"),), nprocs=2)  # type: ignore[no-untyped-call]  # the library's
