"""Profiles the work of K-FAC for a layer: its Kronecker factors, and how long they take on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from runner.model.boundary import enter_graph, map_tensors
from runner.optim.kinds.kfac import Factor, factor_sizes
from runner.profile import FactorProfile
from runner.profiling.backward_scan import as_leaf

__all__ = ["factor_timer", "factors_of"]

_TIMED_RUNS = 3


def factors_of(layers: Iterable[nn.Linear], function: Callable[[Any], Any], value: Any) -> tuple[FactorProfile, ...]:
    """The factors of ``layers``, with the sizes seen in one forward.

    Args:
        layers: the layers that are preconditioned.
        function: runs them, given ``value``.
    """
    found: list[FactorProfile] = []
    inputs: set[int] = set()

    def see(layer: nn.Linear, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        taken = given[0] if given else named["input"]
        storage = taken.untyped_storage()._cdata
        rows, (of_inputs, of_outputs) = taken.numel() // layer.in_features, factor_sizes(layer)
        kept = 0 if storage in inputs else taken.numel() * taken.element_size()
        inputs.add(storage)
        found.append(FactorProfile(True, rows, of_inputs, kept))
        found.append(FactorProfile(False, rows, of_outputs, output.numel() * output.element_size()))

    handles = [layer.register_forward_hook(see, with_kwargs=True) for layer in layers]
    if handles:
        function(enter_graph(map_tensors(as_leaf, value)))
    for handle in handles:
        handle.remove()
    return tuple(found)


def factor_timer(
    device: torch.device, now: Callable[[], float]
) -> Callable[[Iterable[FactorProfile]], tuple[FactorProfile, ...]]:
    """Return a function that adds measured seconds to factors: median of three runs, once for each shape.

    Args:
        device: the device of the factors.
        now: the clock.
    """

    @cache
    def timed(rows: int, size: int) -> tuple[float, float]:
        values = torch.randn(rows, size, device=device)
        factor = Factor(values, "input", size, with_ones=False)
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

    def with_seconds(factors: Iterable[FactorProfile]) -> tuple[FactorProfile, ...]:
        timings = [(factor, timed(factor.rows, factor.size)) for factor in factors]
        return tuple(
            replace(factor, sum_seconds=sums, inversion_seconds=inverse) for factor, (sums, inverse) in timings
        )

    return with_seconds
