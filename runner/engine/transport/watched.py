"""Arrivals that can be seen without waiting for them: a thread per way waits in the rank's place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from torch import Tensor

from runner.engine.transport.base import Channel, Handle, Transport, TransportAround

__all__ = ["WatchedTransport"]

_WATCHED = (Channel.ACTIVATION, Channel.GRADIENT)


class WatchedTransport(TransportAround):
    """Another transport, whose activations and gradients tell when they are there, whatever it is.

    Args:
        inner: what carries the messages; a thread must be able to wait for them.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._news = threading.Condition()
        self._ways: dict[tuple[int, Channel], SimpleQueue[_Arrival]] = {}

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        handle = super().receive(buffer, peer, channel)
        if channel not in _WATCHED:
            return handle
        way = peer, channel
        if way not in self._ways:
            self._ways[way] = SimpleQueue()
            threading.Thread(target=_watch, args=(self._ways[way],), daemon=True).start()
        arrival = _Arrival(handle, self._news)
        self._ways[way].put(arrival)
        return arrival

    def wait_for_any(self, messages: Sequence[Sequence[Handle]]) -> None:
        """Block until all parts of one of the messages are there."""
        with self._news:
            self._news.wait_for(lambda: any(all(part.is_completed() for part in message) for message in messages))


class _Arrival:
    """A :class:`Handle` that a thread waits for; its error is raised where the rank waits."""

    def __init__(self, handle: Handle, news: threading.Condition) -> None:
        self._handle: Handle | None = handle
        self._news = news
        self._error: BaseException | None = None

    def come(self) -> None:
        assert self._handle is not None
        try:
            self._handle.wait()
        except BaseException as error:
            self._error = error
        with self._news:
            self._handle = None  # and with it the message's tensor, which belongs to whoever receives it
            self._news.notify_all()

    def wait(self) -> None:
        with self._news:
            self._news.wait_for(self.is_completed)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._handle is None


def _watch(way: SimpleQueue[_Arrival]) -> None:
    while True:
        way.get().come()
