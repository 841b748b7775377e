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

from runner.engine.transport.objects import all_gather_values, broadcast_value, gather_values
from runner.pulse import Phase, Pulse

__all__ = ["CollectiveStrategy"]

Value = TypeVar("Value")

# Before torch 2.14 it has an underscore, by which torchtitan changes time-outs, too.
_set_timeout: Any = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout


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
        file.
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
            _set_timeout(timeout, dist.group.WORLD)

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and self.world_size > 1:
            dist.barrier()

    @override
    def broadcast(self, obj: Value, src: int = 0) -> Value:
        if self.world_size == 1:
            return obj
        return broadcast_value(obj, src)

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
        return gather_values(value)

    def all_gather_objects(self, value: Value) -> list[Value]:
        """Every rank's ``value``, ordered by rank, on every rank."""
        if self.world_size == 1:
            return [value]
        return all_gather_values(value)
