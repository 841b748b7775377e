"""The bytes that this process has sent over TCP, as the kernel counts them: of Gloo's messages and collectives."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator

__all__ = ["WireCount", "sent_over_tcp", "tcp_sockets"]

_BYTES_SENT_AT = 200  # of tcpi_bytes_sent in struct tcp_info, include/uapi/linux/tcp.h, since Linux 4.19
_LENGTH = 208
_OPENING_BLOCKS = 2  # Gloo connects to a peer when the first collective needs it


def tcp_sockets() -> list[int]:
    """The descriptors of this process's TCP connections; empty where the system does not list them."""
    if sys.platform != "linux":
        return []
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _sent_by(number) is not None]


def sent_over_tcp(sockets: Iterable[int]) -> int:
    """Bytes, without headers, that these sockets have sent; one that is closed by now counts nothing."""
    return sum(_sent_by(number) or 0 for number in sockets)


def _sent_by(descriptor: int) -> int | None:
    """Bytes that a TCP connection has sent; None for anything else."""
    try:
        own = socket.socket(fileno=descriptor)
    except OSError:  # no socket
        return None
    try:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return None
        told = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        return int(struct.unpack_from("Q", told, _BYTES_SENT_AT)[0]) if len(told) >= _LENGTH else None
    except OSError:
        return None
    finally:
        own.detach()  # its owner closes it


class WireCount:
    """Adds up what the process sends over TCP within blocks.

    Attributes:
        sent: bytes so far; 0 where the kernel does not tell.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._sockets: list[int] = []
        self._blocks = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is sent within the block."""
        before = sent_over_tcp(self._sockets) if self._blocks else sent_over_tcp(tcp_sockets())
        yield
        if self._blocks < _OPENING_BLOCKS:
            self._sockets = tcp_sockets()
        self._blocks += 1
        self.sent += sent_over_tcp(self._sockets) - before
