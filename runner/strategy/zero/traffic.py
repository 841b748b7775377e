"""Counts the bytes that DeepSpeed's collectives send, where it calls torch.distributed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["Traffic"]

# Collectives of DeepSpeed's backend (deepspeed/comm/torch.py), each with: the kind of data that it carries in a step;
# the name of the argument that is as large as all ranks' parts together; the positions of that argument and of the
# group; how often a ring sends (R - 1) / R of those bytes.
_COLLECTIVES = {
    "all_reduce": ("weight_gradients", "tensor", 0, 2, 2),
    "reduce": ("weight_gradients", "tensor", 0, 3, 1),
    "reduce_scatter_tensor": ("weight_gradients", "input_tensor", 1, 3, 1),
    "all_to_all_single": ("weight_gradients", "input", 1, 4, 1),
    "all_gather_into_tensor": ("weights", "output_tensor", 0, 2, 1),
    "all_gather": ("weights", "tensor_list", 0, 2, 1),
}
_LONGEST_HOLD_SECONDS = 0.2


class Traffic:
    """Bytes that this rank has sent to its stage's replicas within steps, as a ring algorithm sends them.

    An all-reduce of n bytes over R ranks sends 2 (R - 1) / R n bytes per rank; a gather or scatter of n bytes in total
    sends half of that. Single numbers (norms, flags) are not counted.
    """

    def __init__(self) -> None:
        self.sent = {"weights": 0.0, "weight_gradients": 0.0}
        self.steps = 0
        self._counts = False
        self._waits = False

    def per_step(self) -> dict[str, float]:
        """Kind to bytes, the mean over the steps so far."""
        return {kind: sent / max(1, self.steps) for kind, sent in self.sent.items()}

    @contextlib.contextmanager
    def step(self, *, settled: bool = False) -> Iterator[None]:
        """Count what is sent within the block.

        Args:
            settled: whether to wait after each collective until no thread holds its tensors. Gloo's threads release
                them
                up to milliseconds later, so a bucket may still exist while the optimizer updates, and a measured peak
                would differ from run to run.
        """
        self._counts, self._waits, self.steps = True, settled, self.steps + 1
        try:
            yield
        finally:
            self._counts = self._waits = False

    def watch(self, backend: Any) -> None:
        """Count what goes through a backend of ``deepspeed.comm``, instead of an earlier counter."""
        for name, (kind, argument, place, place_of_group, rounds) in _COLLECTIVES.items():
            own = getattr(type(backend), name).__get__(backend)
            setattr(backend, name, self._counted(own, kind, rounds, (argument, place), ("group", place_of_group)))

    def _counted(
        self, call: Callable[..., Any], kind: str, rounds: int, whole: tuple[str, int], group: tuple[str, int]
    ) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*given: Any, **named: Any) -> Any:
            if self._counts:
                ranks = dist.get_world_size(_argument(given, named, *group))
                self._add(kind, rounds * (ranks - 1) / ranks, _argument(given, named, *whole))
            tensor = _argument(given, named, *whole)
            if not (self._waits and isinstance(tensor, Tensor)):
                return call(*given, **named)
            references = _references(tensor)
            result = call(*given, **named)
            if result is None or result.is_completed():
                _wait_until_let_go(tensor, references)
            return result

        return counted

    def _add(self, kind: str, times: float, whole: Tensor | list[Tensor]) -> None:
        tensors = whole if isinstance(whole, list) else [whole]
        if sum(tensor.numel() for tensor in tensors) > len(tensors):
            self.sent[kind] += times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _references(tensor: Any) -> int:
    count: int = tensor._use_count()
    return count


def _wait_until_let_go(tensor: Tensor, references: int) -> None:
    end = time.perf_counter() + _LONGEST_HOLD_SECONDS
    while _references(tensor) > references and time.perf_counter() < end:
        time.sleep(1e-4)


def _argument(given: tuple[Any, ...], named: Mapping[str, Any], name: str, place: int) -> Any:
    return given[place] if place < len(given) else named.get(name)
