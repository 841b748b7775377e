"""Optimizers by name, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from runner.config.schema import OptimizerConfig

__all__ = ["build_optimizer", "measure_step_seconds_per_byte", "state_bytes_per_gradient_byte"]

_PROBE_ELEMENTS = 1 << 20
_PROBE_STEPS = 5


def build_optimizer(config: OptimizerConfig, parameters: Iterable[Tensor]) -> Optimizer:
    """The optimizer of the configuration over ``parameters``: torch's own, with torch's defaults elsewhere."""
    trained = list(parameters) or [torch.zeros(0, requires_grad=True)]  # a stage may have nothing to train
    betas = (config.betas[0], config.betas[1])
    match config.name:
        case "adamw":
            return AdamW(trained, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)
        case "adam":
            return Adam(trained, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)
        case "sgd":
            return SGD(trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    raise ValueError(f"optimizer = {config.name} has no builder")


def state_bytes_per_gradient_byte(config: OptimizerConfig) -> float:
    """Bytes of optimizer state for each byte of gradient: two moments for Adam, one buffer for momentum."""
    if config.name in ("adam", "adamw"):
        return 2.0
    return 1.0 if config.momentum else 0.0


def measure_step_seconds_per_byte(config: OptimizerConfig, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of one optimizer step per byte of gradient, timed on a small tensor (median of five, one warm-up)."""
    parameter = torch.zeros(_PROBE_ELEMENTS, dtype=dtype, device=device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(config, [parameter])
    seconds = []
    for _ in range(_PROBE_STEPS + 1):
        start = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:]) / (parameter.numel() * parameter.element_size())
