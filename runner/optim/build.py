"""Makes optimizers by name, and measures their cost."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.config.precision import PRECISIONS
from runner.config.schema import OptimizerConfig, RunConfig
from runner.optim.catalogue.registry import optimizer_of
from runner.optim.states.delayed import DelayedUpdate
from runner.optim.states.elastic import ElasticAverage
from runner.optim.states.master import MasterWeights
from runner.plan.averaging import Averaging, averaging_of

__all__ = [
    "build_optimizer",
    "measure_step_seconds_per_byte",
    "observed_state_bytes",
    "observed_state_ratio",
    "optimizer_of_run",
    "over_other_parameters",
    "state_bytes_per_gradient_byte",
]

_PROBE_ELEMENTS = 1 << 20
_PROBE_STEPS = 5


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[Tensor],
    *,
    master_weights: bool = False,
    delay_from: int | None = None,
    averaging: Averaging | None = None,
) -> Optimizer:
    """Make the optimizer of the configuration over ``parameters``.

    With ``master_weights`` it updates fp32 copies: see :class:`runner.optim.states.master.MasterWeights`. With
    ``delay_from`` its updates take effect one step late: see :class:`runner.optim.states.delayed.DelayedUpdate`. With
    ``averaging`` it updates weights of several pipelines: see :class:`runner.optim.states.elastic.ElasticAverage`.
    """
    trained = list(parameters) or [torch.zeros(0, requires_grad=True)]  # a stage may have nothing to train
    make = partial(optimizer_of(config).make, config)
    if master_weights:
        return MasterWeights(trained, make)
    if delay_from is not None:
        return DelayedUpdate(trained, make, first=delay_from)
    if averaging is not None:
        return ElasticAverage(trained, make, averaging)
    return make(trained)


def optimizer_of_run(
    config: RunConfig,
    parameters: Iterable[Tensor],
    *,
    masters: bool = True,
    delayed: bool = True,
    averaged: bool = True,
) -> Optimizer:
    """Make the optimizer of a request over ``parameters``, with what the request puts around its updates.

    Args:
        config: the request.
        parameters: the weights that it updates.
        masters, delayed, averaged: False: without the masters, the delay or the averaging of :func:`build_optimizer`.
    """
    return build_optimizer(
        config.optimizer,
        parameters,
        master_weights=masters and PRECISIONS[config.precision.name].master_weights,
        delay_from=config.offload.delay_from if delayed else None,
        averaging=averaging_of(config) if averaged else None,
    )


def state_bytes_per_gradient_byte(config: OptimizerConfig, master_ratio: float = 0.0) -> float:
    """Bytes of optimizer state for each byte of gradient, for states as wide as the weights that they update.

    Args:
        master_ratio: bytes of a master weight per byte of its gradient; 0 without master weights.
    """
    kind = optimizer_of(config)
    if kind.values is None:
        states = observed_state_ratio(partial(kind.make, config))
    else:
        states = kind.values + kind.keeps_momentum(config)
    return states * (master_ratio or 1.0) + master_ratio


def observed_state_ratio(make: Callable[[list[Tensor]], Optimizer]) -> float:
    """Bytes of optimizer state for each byte of gradient, observed in a step of ``make([a small tensor])``."""
    return observed_state_bytes(make, torch.zeros(64, 64)) / (64 * 64 * torch.float32.itemsize)


def observed_state_bytes(make: Callable[[list[Tensor]], Optimizer], tensor: Tensor) -> int:
    """Bytes of the state of a tensor, observed in a step on it."""
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    return sum(each.nbytes for each in optimizer.state[parameter].values() if isinstance(each, Tensor) and each.dim())


def over_other_parameters(optimizer: Optimizer, parameters: list[Tensor]) -> Optimizer:
    """An optimizer of the same class and settings that has not stepped yet, over ``parameters`` in one group.

    The class is not called again, because its arguments may differ from its defaults: AdamW keeps more than it takes.
    """
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.__dict__.pop("step", None)  # a learning-rate scheduler has put one there that steps ``optimizer``
    other.state = defaultdict(dict)
    other.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    return other


def measure_step_seconds_per_byte(config: RunConfig, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of one optimizer step per byte of gradient, timed on a small tensor (median of five, one warm-up)."""
    parameter = torch.zeros(_PROBE_ELEMENTS, dtype=dtype, device=device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_of_run(config, [parameter], delayed=False, averaged=False)
    if isinstance(optimizer, MasterWeights):
        master = optimizer.master_of(parameter)
        master.grad = torch.zeros_like(master)
    seconds = []
    for _ in range(_PROBE_STEPS + 1):
        start = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:]) / (parameter.numel() * parameter.element_size())
