"""The learning rate as a function of the step index.

``warmup_decay`` is DeepSpeed's WarmupDecayLR with its logarithmic warm-up: 60 % of the peak after ten of 55 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from runner.config.schema import LrSchedulerConfig

__all__ = ["build_scheduler", "learning_rate"]


def learning_rate(config: LrSchedulerConfig, peak: float, total_steps: int) -> Callable[[int], float]:
    """The rate at step 0, 1, …

    Args:
        config: the section; ``warmup_steps`` and ``min_lr`` count for every kind but ``constant``.
        peak: ``optimizer.lr``.
        total_steps: where the decay ends, unless the section says otherwise.
    """
    total = config.total_steps or total_steps
    warmup, low = config.warmup_steps, config.min_lr

    def fraction(step: int) -> float:
        """How much of the way from ``min_lr`` to the peak."""
        if step < warmup:
            logarithmic = config.name == "warmup_decay" and warmup > 1
            return math.log(step + 1) / math.log(warmup) if logarithmic else (step + 1) / warmup
        left = max(0.0, min(1.0, (total - step) / max(1, total - warmup)))
        return 0.5 * (1 - math.cos(math.pi * left)) if config.name == "cosine" else left

    if config.name == "constant":
        return lambda step: peak
    return lambda step: low + (peak - low) * fraction(step)


def build_scheduler(config: LrSchedulerConfig, optimizer: Optimizer, peak: float, total_steps: int) -> LambdaLR:
    """Torch's scheduler that applies :func:`learning_rate` to every parameter group."""
    rate = learning_rate(config, peak, total_steps)
    return LambdaLR(optimizer, lambda step: rate(step) / peak)
