"""Profiles the work of K-FAC for a layer: its Kronecker factors, and how long they take on this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from runner.model.boundary import enter_graph, map_tensors
from runner.optim.kinds.kfac import Factor, curvature_bytes, factor_sizes, preconditioned_layers
from runner.profile import FillProfile
from runner.profiling.backward_scan import as_leaf
from runner.profiling.fills import TimeFills
from runner.schedule.generators.one_directional.pipefisher import CURV_A, CURV_B, INV_A, INV_B

__all__ = ["FactorProfiler"]

_TIMED_RUNS = 3
_ELEMENT = 4  # bytes: factors are fp32
_TEMPORARIES = 2  # tensors of a factor's size: the one that is factorised, and the new inverse beside the old one


class FactorProfiler:
    """K-FAC's :class:`runner.profiling.fills.FillProfiler`."""

    def state_bytes(self, module: nn.Module, tied: Collection[Tensor]) -> int:
        """The bytes of the factors and inverses of all linear layers that are preconditioned."""
        return sum(map(curvature_bytes, preconditioned_layers(module, tied)))

    def fills(
        self, module: nn.Module, tied: Collection[Tensor], function: Callable[[Any], Any], value: Any
    ) -> tuple[FillProfile, ...]:
        """The sums and inversions of these layers; one forward shows their sizes."""
        found: list[FillProfile] = []
        inputs: dict[int, Any] = {}  # memory stays, so that no other takes its place

        def see(layer: nn.Linear, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
            taken = given[0] if given else named["input"]
            storage = taken.untyped_storage()
            kept = 0 if storage._cdata in inputs else storage.nbytes()  # of all, where this is a part
            inputs[storage._cdata] = storage
            rows = taken.numel() // layer.in_features
            found.extend(_of_layer(rows, factor_sizes(layer), (kept, output.numel() * output.element_size())))

        layers = preconditioned_layers(module, tied)
        handles = [layer.register_forward_hook(see, with_kwargs=True) for layer in layers]
        if handles:
            function(enter_graph(map_tensors(as_leaf, value)))
        for handle in handles:
            handle.remove()
        return tuple(found)

    def timer(self, device: torch.device, now: Callable[[], float]) -> TimeFills:
        """Return a function that adds the median of three runs, which are measured once for each shape."""

        @cache
        def timed(rows: int, size: int) -> tuple[float, float]:
            return _seconds(torch.randn(rows, size, device=device), now)

        def with_seconds(fills: Iterable[FillProfile]) -> tuple[FillProfile, ...]:
            timings = [(fill, timed(fill.rows, fill.size)) for fill in fills]
            return tuple(
                replace(fill, seconds=sums if fill.of_microbatch else inverse) for fill, (sums, inverse) in timings
            )

        return with_seconds


def _of_layer(rows: int, sizes: tuple[int, int], kept: tuple[int, int]) -> Iterator[FillProfile]:
    """The sums and inversions of one layer's factors: of inputs, and of output gradients.

    An inversion takes n^3 / 3 FLOPs for the Cholesky factorisation and 2 n^3 / 3 for the inverse from it. The
    temporaries are those of the larger factor, because both are inverted at any time.
    """
    temporaries = _TEMPORARIES * _ELEMENT * max(sizes) ** 2
    for kind, size, num_bytes in zip((CURV_A, CURV_B), sizes, kept, strict=True):
        yield FillProfile(kind.name, True, rows, size, 2.0 * rows * size**2, kept_bytes=num_bytes)
    for kind, size in zip((INV_A, INV_B), sizes, strict=True):
        yield FillProfile(kind.name, False, rows, size, float(size**3), peak_bytes=temporaries)


def _seconds(values: Tensor, now: Callable[[], float]) -> tuple[float, float]:
    """Measure the sum of ``values`` [rows, size] and the inversion of the factor; return medians after a warm-up."""
    factor = Factor(values, "input", values.shape[1], with_ones=False)
    sums, inversions = [], []
    for _ in range(_TIMED_RUNS + 1):
        factor.clear()
        moments = [now()]
        factor.add(values)
        moments.append(now())
        factor.inverse(1.0)
        moments.append(now())
        sums.append(moments[1] - moments[0])
        inversions.append(moments[2] - moments[1])
    return median(sums[1:]), median(inversions[1:])
