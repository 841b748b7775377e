"""Messages of ranks that share a GPU: through the host, because NCCL refuses two ranks on one device.

Source: NCCL's "Duplicate GPU detected" (ncclInvalidUsage, ``src/init.cc``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runner.engine.transport.base import Channel, Gathering, Handle, Transport, TransportAround

__all__ = ["StagedTransport"]


class StagedTransport(TransportAround):
    """Sends copies of a device's tensors that are on the host.

    A copy to the host waits for the stream, so that a message holds what the kernels before it have computed; a copy to
    the device is a kernel of the stream like any other.

    Args:
        inner: the transport of the host's tensors.
        device: where the tensors of messages are.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self.device = device

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        return _Sent(self._inner, tensor.to("cpu", copy=True), peer, channel)

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        host = torch.empty_like(buffer, device="cpu")
        return _Arriving(self._inner.receive(host, peer, channel), lambda: buffer.copy_(host))

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        host = tensor.to("cpu", copy=True)
        return _Arriving(self._inner.all_reduce(host, group), lambda: tensor.copy_(host))

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        return _Gathered(self._inner.start_all_gather(tensor.to("cpu", copy=True), group), self.device)

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> list[Tensor]:
        return [part.to(self.device) for part in self._inner.all_gather(tensor.to("cpu", copy=True), group)]


class _Sent:
    """A copy that is being sent, and lives as long as this."""

    def __init__(self, inner: Transport, host: Tensor, peer: int, channel: Channel) -> None:
        self._host = host
        self._handle = inner.send(host, peer, channel)

    def wait(self) -> None:
        self._handle.wait()

    def is_completed(self) -> bool:
        return self._handle.is_completed()


class _Arriving:
    """Something that arrives on the host and is copied to the device, once, when somebody waits for it."""

    def __init__(self, handle: Handle, copy: Callable[[], object]) -> None:
        self._handle = handle
        self._copy: Callable[[], object] | None = copy

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            self._handle.wait()
            copy()

    def is_completed(self) -> bool:
        return self._handle.is_completed()


class _Gathered:
    def __init__(self, gathering: Gathering, device: torch.device) -> None:
        self._gathering, self._device = gathering, device

    def wait(self) -> list[Tensor]:
        return [part.to(self._device) for part in self._gathering.wait()]
