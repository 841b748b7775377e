"""The loss scaling that a request asks for."""

from __future__ import annotations

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.engine.loss_scale import LossScaling

__all__ = ["loss_scaling"]


def loss_scaling(config: RunConfig) -> LossScaling | None:
    """The loss scaling, or None if the precision has the exponent range of fp32."""
    section = config.precision
    if not PRECISIONS[section.name].loss_scaling:
        return None
    return LossScaling(
        initial_scale=section.initial_scale,
        growth_interval=section.growth_interval,
        growth_factor=section.growth_factor,
        backoff_factor=section.backoff_factor,
        minimum_scale=section.minimum_scale,
        samples=config.data.batch_size,
    )
