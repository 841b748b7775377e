"""A transport whose arrivals can be tested without waiting: a thread for each peer and channel waits for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from runner.engine.transport.background import BackgroundThread
from runner.engine.transport.base import Channel, Handle, Transport, TransportAround

__all__ = ["WatchedTransport"]

_WATCHED = (Channel.ACTIVATION, Channel.GRADIENT)


class WatchedTransport(TransportAround):
    """Wraps any transport so that activations and gradients tell when they have arrived.

    Args:
        inner: the transport that moves the messages; it must allow a thread to wait for them.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._news = threading.Condition()
        self._ways: dict[tuple[int, Channel], BackgroundThread[_Arrival]] = {}

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        handle = super().receive(buffer, peer, channel)
        if channel not in _WATCHED:
            return handle
        way = peer, channel
        if way not in self._ways:
            self._ways[way] = BackgroundThread(_Arrival.come, f"{channel.name.lower()}s from rank {peer}")
        arrival = _Arrival(handle, self._news)
        self._ways[way].put(arrival)
        return arrival

    def wait_for_any(self, messages: Sequence[Sequence[Handle]]) -> None:
        """Block until all parts of one of the messages have arrived."""
        with self._news:
            self._news.wait_for(lambda: any(all(part.is_completed() for part in message) for message in messages))


class _Arrival:
    """A :class:`Handle` for which a thread waits; ``wait`` raises the thread's error."""

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
            self._handle = None  # this releases the message's tensor, which belongs to the receiver
            self._news.notify_all()

    def wait(self) -> None:
        with self._news:
            self._news.wait_for(self.is_completed)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._handle is None
