"""The strategy that keeps a number of each stage's blocks in the host's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from runner.memory.solve.residency import WeightUnit
from runner.memory.solve.weight_strategy import StageUnits, WeightStrategy

__all__ = ["WEIGHTS"]


def _choose(stage: StageUnits) -> list[WeightUnit]:
    """The last blocks: the turn from forwards to backwards is among them, where two need not move."""
    blocks = _blocks(stage.units)
    return blocks[-(stage.options.blocks or 1) :]


def _blocks(units: Sequence[WeightUnit]) -> list[WeightUnit]:
    """The units of the size that takes most bytes in all: those that the model repeats."""
    sums = Counter[int]()
    for unit in units:
        sums[unit.weight_bytes] += unit.weight_bytes
    if not sums:
        return []
    size, _ = max(sums.items(), key=lambda item: item[1])
    return [unit for unit in units if unit.weight_bytes == size]


WEIGHTS = WeightStrategy(
    "blockswap",
    _choose,
    source="block swap of kohya-ss/musubi-tuner and of ComfyUI's wrappers",
    about="offload.blocks of each stage's blocks are in the host's memory, two of them on the device in turn",
)
