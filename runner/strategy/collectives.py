"""Collectives over all ranks, as Lightning calls them; used only outside steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed import distributed_c10d
from typing_extensions import override

from runner.model.boundary import map_tensors
from runner.pulse import Phase, Pulse

__all__ = ["CollectiveStrategy", "sendable"]

Value = TypeVar("Value")


class CollectiveStrategy(ParallelStrategy):
    """Collectives over all ranks that do nothing on a single rank.

    Attributes:
        patience_seconds: within :meth:`patient`, how long ranks wait for one another; else 0.
    """

    patience_seconds = 0.0
    _timeout: timedelta

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Within the block, collectives wait for other ranks this long, if that is longer than a step may take.

        All ranks must enter it together. The block holds what one rank does while the others wait, e.g. to write a
        file. ``_set_pg_timeout`` has an underscore and no public counterpart; torchtitan changes time-outs by it, too
        (``torchtitan/distributed/utils.py``).
        """
        self.patience_seconds = seconds
        try:
            self._set_timeout(max(self._timeout, timedelta(seconds=seconds)))
            with Pulse.current().within(Phase.SAVE):
                yield
        finally:
            self._set_timeout(self._timeout)
            self.patience_seconds = 0.0

    def _set_timeout(self, timeout: timedelta) -> None:
        if dist.is_initialized() and self.world_size > 1:
            distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and self.world_size > 1:
            dist.barrier()

    @override
    def broadcast(self, obj: Value, src: int = 0) -> Value:
        if self.world_size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        if self.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        result = tensor.clone()
        dist.all_reduce(result)
        mean = reduce_op in (None, "mean", "avg", dist.ReduceOp.AVG)
        return result / self.world_size if mean else result

    def gather_objects(self, value: Value) -> list[Value] | None:
        """Every rank's ``value``, ordered by rank, on rank 0; None on other ranks."""
        if self.world_size == 1:
            return [value]
        parts: list[Any] | None = [None] * self.world_size if self.global_rank == 0 else None
        dist.gather_object(sendable(value), parts)
        return parts

    def all_gather_objects(self, value: Value) -> list[Value]:
        """Every rank's ``value``, ordered by rank, on every rank."""
        if self.world_size == 1:
            return [value]
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, sendable(value))
        return parts


def sendable(value: Value) -> Value:
    """``value`` with copies of tensors that are part of a larger storage: pickle would send the whole storage."""

    def alone(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    sent: Value = map_tensors(alone, value)
    return sent
