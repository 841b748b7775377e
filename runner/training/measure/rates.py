"""What a run computes per second: floating-point operations, tokens, and the share of the machine's peak."""

from __future__ import annotations

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.plan.values import RunPlan

__all__ = ["flops_per_step", "mfu", "tokens_per_second"]


def flops_per_step(config: RunConfig, plan: RunPlan) -> float:
    """FLOPs of the profiled micro-batch, scaled to the samples of a step."""
    rows = [*plan.profile.layers, plan.profile.loss]
    flops = sum(row.forward_flops + row.backward_flops for row in rows)
    return flops * config.data.batch_size / plan.profile.samples


def mfu(config: RunConfig, plan: RunPlan, seconds: float | None) -> float | None:
    """Model FLOPs utilization with steps of so many seconds, from 0 to 1; None if the machine's peak is not known."""
    peak = config.hardware.flops.get(PRECISIONS[config.precision.name].arithmetic)
    if not peak or not seconds:
        return None
    return flops_per_step(config, plan) / seconds / (peak * plan.layout["world_size"])


def tokens_per_second(config: RunConfig, plan: RunPlan, seconds: float | None) -> float | None:
    """Tokens per second with steps of so many seconds; None if a sample is not a sequence of tokens."""
    tokens = plan.profile.tokens_per_sample
    return tokens * config.data.batch_size / seconds if tokens and seconds else None
