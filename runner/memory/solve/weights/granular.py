"""The strategy that keeps a share of each stage's layers in the host's memory: the least that memory_limit asks for."""

from __future__ import annotations

import math

from runner.memory.solve.residency import WeightUnit
from runner.memory.solve.weight_sets import least_set
from runner.memory.solve.weight_strategy import StageUnits, WeightStrategy

__all__ = ["WEIGHTS"]


def _choose(stage: StageUnits) -> list[WeightUnit]:
    units, fraction = stage.units, stage.options.fraction
    if fraction is not None:
        return list(units[: math.ceil(fraction * len(units))])
    return least_set(units, stage.excess_bytes or 0)


WEIGHTS = WeightStrategy(
    "granular",
    _choose,
    source="Lin et al. 2021, M6-10T: A Sharing-Delinking Paradigm for Efficient Multi-Trillion Parameter Pretraining",
    about="as few layers as memory_limit asks for, or offload.fraction of each stage's, are in the host's memory",
    reads_budget=True,
)
