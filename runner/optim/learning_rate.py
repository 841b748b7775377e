"""The learning rate as a function of the step index.

``warmup_decay`` is DeepSpeed's WarmupDecayLR with its logarithmic warm-up: 60 % of the peak after ten of 55 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from runner.config.own_rate import own_rate
from runner.config.schema import LrSchedulerConfig, RunConfig

__all__ = ["build_scheduler", "learning_rate", "peak_rate", "scaled_rates"]


def learning_rate(config: LrSchedulerConfig, peak: float, total_steps: int) -> Callable[[int], float]:
    """The function from the step (0, 1, …) to its learning rate.

    Args:
        config: the section; ``warmup_steps`` and ``min_lr`` apply to every kind except ``constant`` and a user's own.
        peak: see :func:`peak_rate`.
        total_steps: the step at which the decay ends, unless the section says otherwise.
    """
    if config.target is not None:
        return own_rate(config, peak, total_steps)
    total = config.total_steps or total_steps
    warmup, low = config.warmup_steps, config.min_lr

    def fraction(step: int) -> float:
        """The rate of a step as a fraction of the way from ``min_lr`` to the peak."""
        if step < warmup:
            logarithmic = config.name == "warmup_decay" and warmup > 1
            return math.log(step + 1) / math.log(warmup) if logarithmic else (step + 1) / warmup
        left = max(0.0, min(1.0, (total - step) / max(1, total - warmup)))
        return 0.5 * (1 - math.cos(math.pi * left)) if config.name == "cosine" else left

    if config.name == "constant":
        return lambda step: peak
    return lambda step: low + (peak - low) * fraction(step)


def peak_rate(config: RunConfig) -> float:
    """The highest rate: ``optimizer.lr``, scaled in proportion to the batch size if ``base_batch`` is given.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", the linear scaling rule.
    """
    base = config.lr_scheduler.base_batch
    return config.optimizer.lr * (config.data.batch_size / base if base is not None else 1.0)


def build_scheduler(config: RunConfig, optimizer: Optimizer) -> LambdaLR:
    """Torch's scheduler that applies :func:`learning_rate` to every parameter group of the request's optimizer."""
    rate = learning_rate(config.lr_scheduler, peak_rate(config), config.trainer.max_steps)
    return LambdaLR(optimizer, lambda step: rate(step) / config.optimizer.lr)


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Within the block, the learning rates of the optimizer are multiplied by ``factor``."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
