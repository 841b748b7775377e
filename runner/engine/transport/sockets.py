"""The transport between processes of one machine: short messages use Unix sockets, all others torch.distributed.

In Gloo, a separate thread receives each message and wakes the thread that waits for it, after announcements in both
directions: several wake-ups per message. Here the waiting thread reads the socket itself, and the sending thread writes
as much as the socket's buffer takes; if the buffer is full, another thread writes the rest. For long messages Gloo's
threads are better, because they move data during compute. Both ends know a message's length, and so which of the two
ways it takes; each way is a FIFO.
"""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from runner.engine.transport.background import BackgroundThread
from runner.engine.transport.base import Channel, Handle
from runner.engine.transport.objects import all_gather_values
from runner.engine.transport.processes import ProcessTransport
from runner.errors import RunFailedError

__all__ = ["SocketTransport"]

_SHORT = 64 << 10  # bytes of the longest message that goes over a socket
_BUFFER = 4 << 20  # bytes to ask for; the system gives what it allows
_HELLO = struct.Struct("ii")  # rank and channel of the connecting side
_TIMEOUT = struct.Struct("ll")  # seconds and microseconds


class SocketTransport(ProcessTransport):
    """The transport of this process, whose groups are all on this machine. Every rank must construct it.

    Args:
        groups: the same as for :class:`ProcessTransport`; the ranks of a group can exchange messages.
        timeout_seconds: the longest wait for a message.
    """

    def __init__(self, groups: Iterable[Sequence[int]], *, timeout_seconds: float) -> None:
        groups = [tuple(group) for group in groups]
        super().__init__(torch.device("cpu"), groups, timeout_seconds=timeout_seconds)
        peers = {peer for group in groups if self.rank in group for peer in group} - {self.rank}
        made = _connect(self.rank, peers, timeout_seconds)
        self._lines = {(peer, channel): _Line(one, peer) for (peer, channel), one in made.items()}

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        if tensor.nbytes > _SHORT:
            return super().send(tensor, peer, channel)
        return self._lines[peer, channel].send(_bytes_of(tensor))

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        if buffer.nbytes > _SHORT:
            return super().receive(buffer, peer, channel)
        return self._lines[peer, channel].receive(_bytes_of(buffer))

    def tells_completion(self, num_bytes: int) -> bool:
        return num_bytes <= _SHORT


_NOTHING = memoryview(b"")


class _Line:
    """One channel to and from one peer, with a FIFO in each direction."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._socket = connection
        self._peer = peer
        self._outgoing, self._incoming = _Way(self._write), _Way(self._read)

    def send(self, data: memoryview) -> Handle:
        sent = 0
        if self._outgoing.is_free():
            try:
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
        transfer = _Transfer(self._outgoing, data[sent:])
        if transfer.data:
            self._outgoing.enter(transfer, in_background=True)
        else:
            transfer.done = True
        return transfer

    def receive(self, data: memoryview) -> Handle:
        transfer = _Transfer(self._incoming, data)
        self._incoming.enter(transfer, in_background=False)
        return transfer

    def _write(self, data: memoryview) -> None:
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            raise RuntimeError(f"rank {self._peer} took no message within the longest wait") from None

    def _read(self, data: memoryview) -> None:
        while data:
            try:
                count = self._socket.recv_into(data, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise RuntimeError(f"rank {self._peer} sent no message within the longest wait") from None
            if not count:
                raise RuntimeError(f"rank {self._peer} closed its connection: it has ended")
            data = data[count:]


class _Way:
    """Transfers in one direction, which are done in order by the thread that waits for one, or in the background."""

    def __init__(self, carry_out: Callable[[memoryview], None]) -> None:
        self._carry_out = carry_out
        self._waiting: deque[_Transfer] = deque()
        self._lock = threading.Lock()
        self._background: BackgroundThread[_Transfer] | None = None

    def is_free(self) -> bool:
        return not self._waiting

    def enter(self, transfer: _Transfer, *, in_background: bool) -> None:
        """Queue a transfer.

        Args:
            in_background: whether a background thread does it (after those before it), even if nobody waits for it.
        """
        self._waiting.append(transfer)
        if in_background:
            if self._background is None:
                self._background = BackgroundThread(self.finish, "short messages")
            self._background.put(transfer)

    def finish(self, transfer: _Transfer) -> None:
        """Do the queued transfers up to ``transfer``."""
        with self._lock:
            while not transfer.done:
                first = self._waiting[0]
                self._carry_out(first.data)
                first.data = _NOTHING  # before it is done: who waits for it has this memory again from then on
                first.done = True
                self._waiting.popleft()


class _Transfer:
    """A :class:`Handle` of one message in a :class:`_Way`."""

    __slots__ = ("_way", "data", "done")

    def __init__(self, way: _Way, data: memoryview) -> None:
        self._way = way
        self.data = data
        self.done = False

    def wait(self) -> None:
        if not self.done:
            self._way.finish(self)

    def is_completed(self) -> bool:
        return self.done


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor that requires no gradient; the view keeps the memory alive."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _accept(listener: socket.socket, timeout_seconds: float, missing: set[int]) -> tuple[int, Channel, socket.socket]:
    """The next connection, with the rank and the channel that it says it is.

    Raises:
        RunFailedError: none comes, or one says nothing, within the longest wait.
    """
    try:
        connection, _ = listener.accept()
        connection.settimeout(timeout_seconds)
        peer, channel = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
        connection.settimeout(None)
    except TimeoutError:
        ranks = ", ".join(map(str, sorted(missing)))
        raise RunFailedError(f"rank {ranks} did not connect within {timeout_seconds:g} s") from None
    return peer, Channel(channel), connection


def _connect(rank: int, peers: set[int], timeout_seconds: float) -> dict[tuple[int, Channel], socket.socket]:
    """Make a connection for each peer and channel. The addresses are removed when all are connected."""
    with tempfile.TemporaryDirectory(prefix="runner-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "rank")
        listener.bind(address)
        listener.settimeout(timeout_seconds)
        listener.listen(len(Channel) * len(peers) + 1)
        addresses = all_gather_values(address)
        made = {}
        for peer, channel in ((peer, channel) for peer in peers if peer > rank for channel in Channel):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(addresses[peer])
            connection.sendall(_HELLO.pack(rank, channel))
            made[peer, channel] = connection
        expected = {(peer, channel) for peer in peers if peer < rank for channel in Channel}
        while missing := expected - made.keys():
            peer, channel, connection = _accept(listener, timeout_seconds, {peer for peer, _ in missing})
            made[peer, channel] = connection
        dist.barrier()
    longest = _TIMEOUT.pack(int(timeout_seconds), int(timeout_seconds % 1 * 1e6))
    for connection in made.values():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # Python's own timeouts cost a system call per message
            connection.setsockopt(socket.SOL_SOCKET, option, longest)
    return made
