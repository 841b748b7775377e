"""The strategy that keeps all weights in the host's memory; a stage's weights come and go as one."""

from __future__ import annotations

from runner.memory.solve.residency import WeightUnit
from runner.memory.solve.weight_strategy import StageUnits, WeightStrategy

__all__ = ["WEIGHTS"]


def _choose(stage: StageUnits) -> list[WeightUnit]:
    units = stage.units
    if not units:
        return []
    sums = (
        sum(getattr(unit, part) for unit in units) for part in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    )
    return [WeightUnit(units[0].first, units[-1].last, *sums)]


WEIGHTS = WeightStrategy(
    "l2l",
    _choose,
    source="Pudipeddi et al. 2020, Training Large Neural Networks with Constant Memory using a New Execution Algorithm",
    about="the device holds the weights of two stages; all micro-batches go through one stage before the next",
    layer_by_layer=True,
)
