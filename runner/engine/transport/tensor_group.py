"""What ranks that divide layers exchange while the layers run, over the rank's transport."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runner.engine.transport.base import Channel, Transport
from runner.engine.transport.counting import SentBytes

__all__ = ["TensorGroup"]

_PAIR = 2
_YIELDS, _MOST_PAUSES, _PAUSE_SECONDS = 10, 10_000, 1e-4
"""Ways to let a thread of Gloo have this core; the pauses have an end, should somebody else have the tensor, too."""


class TensorGroup:
    """Implements :class:`runner.model.sharded.group.Exchange`.

    On the host, tensors are by default summed in the order of the ranks, so that every run, and a plain sum of the
    parts, gives the same bits. Gloo does so for two ranks. For more it sums each part of a tensor in another order;
    there each rank sends every other one its part, sums its own, and the sums are gathered, which are as many bytes as
    in a ring.

    Args:
        transport: this rank's transport.
        ranks: the global ranks of the group, in the order of their parts.
        sums: ``ordered``: in the order of the ranks; ``native``: as the transport does; ``auto``: see above. What is
            summed to be divided again is summed in that order in any case.

    Attributes:
        sent: counts the bytes that this rank has sent.
        counts: whether what is sent counts; only that of training does.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], sums: str = "auto") -> None:
        self.sent = SentBytes()
        self.counts = True
        self._transport = transport
        self._ranks = tuple(ranks)
        self._index = self._ranks.index(transport.rank)
        differs = transport.device.type == "cpu" and len(self._ranks) > _PAIR
        self._in_order = sums == "ordered" or (sums == "auto" and differs)

    def all_reduce(self, value: Tensor) -> Tensor:
        if self._in_order:
            return self._all_reduced_in_order(value)
        given = [value.clone(memory_format=torch.contiguous_format)]
        self._count(2 * given[0].nbytes)
        handle = self._transport.all_reduce(given[0], self._ranks)
        with self._transport.aside():
            handle.wait()
        del handle
        return _let_go(given)[0]

    def all_reduce_max(self, value: Tensor) -> Tensor:
        self._count(len(self._ranks) * value.nbytes)
        return torch.stack(self._gathered(value)).amax(0)

    def all_gather(self, value: Tensor, dim: int) -> Tensor:
        self._count(len(self._ranks) * value.nbytes)
        return torch.cat(self._gathered(value), dim)

    def reduce_scatter(self, value: Tensor, dim: int) -> Tensor:
        self._count(value.nbytes)
        return self._summed([part.contiguous() for part in value.chunk(len(self._ranks), dim)])

    def divides(self, message: Tensor, needs_gradient: bool) -> bool:
        """Whether a message that all ranks have is sent by parts."""
        return needs_gradient and message.is_floating_point() and not message.numel() % len(self._ranks)

    def own_part(self, message: Tensor) -> Tensor:
        """This rank's part of a contiguous tensor; a view."""
        return self._parts(message)[self._index]

    def complete(self, message: Tensor) -> None:
        """Fill the others' parts of a contiguous tensor, of which each rank has its own."""
        self._count(message.nbytes)
        parts = self._parts(message)
        others = [(parts[at], rank) for at, rank in enumerate(self._ranks) if at != self._index]
        waits = [self._transport.receive(part, rank, Channel.PARTS) for part, rank in others]
        waits += [self._transport.send(parts[self._index], rank, Channel.PARTS) for _, rank in others]
        for handle in waits:
            handle.wait()

    def _parts(self, message: Tensor) -> Sequence[Tensor]:
        return message.view(-1).chunk(len(self._ranks))

    def _all_reduced_in_order(self, value: Tensor) -> Tensor:
        self._count(2 * value.nbytes)  # without what makes all parts as long
        flat = value.reshape(-1)
        padded = functional.pad(flat, (0, -len(flat) % len(self._ranks)))
        own = self._summed(list(padded.chunk(len(self._ranks))))
        return torch.cat(self._gathered(own))[: len(flat)].view(value.shape)

    def _summed(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum, in the order of the ranks, of what each of them has as this rank's part."""
        received = self._exchanged(parts)
        total = received[0].clone()
        for part in received[1:]:
            total += part
        return total

    def _exchanged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What each rank has as this rank's part, in the order of the ranks."""
        own = self._index
        received = [parts[own] if at == own else torch.empty_like(parts[own]) for at in range(len(parts))]
        others = [(at, rank) for at, rank in enumerate(self._ranks) if at != own]
        waits = [self._transport.receive(received[at], rank, Channel.PARTS) for at, rank in others]
        waits += [self._transport.send(parts[at], rank, Channel.PARTS) for at, rank in others]
        with self._transport.aside():
            for handle in waits:
                handle.wait()
        return received

    def _gathered(self, value: Tensor) -> list[Tensor]:
        given = [value.contiguous().detach()]  # a tensor of its own, which nothing else has
        gathering = self._transport.start_all_gather(given[0], self._ranks)
        with self._transport.aside():
            parts = gathering.wait()
        del gathering
        _let_go(given)
        return _let_go(parts)

    def _count(self, num_bytes: float) -> None:
        """Count a collective of so many bytes in a ring, in which each rank sends all parts of them but one."""
        if self.counts:
            parts = len(self._ranks)
            self.sent.add((parts - 1) / parts * num_bytes, parts - 1)


def _let_go(given: list[Tensor]) -> list[Tensor]:
    """Aliases of the tensors of a collective that is done, when its threads have none of them any more.

    Gloo's thread drops them after it has told that all is done, and needs Python's lock for that. Where it must wait,
    they would be alive beyond their last use, and a rank would need more memory than its plan says.

    Args:
        given: the tensors, which nothing else has; it is emptied.
    """
    aliases, watched = [tensor.detach() for tensor in given], [weakref.ref(tensor) for tensor in given]
    given.clear()
    for each in watched:
        for times in range(_MOST_PAUSES):
            if each() is None:
                break
            time.sleep(0 if times < _YIELDS else _PAUSE_SECONDS)
    return aliases
