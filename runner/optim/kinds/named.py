"""Optimizers by name. Libraries besides torch are imported when one of theirs is asked for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from runner.config.schema import OptimizerConfig
from runner.errors import Problem, RequestError
from runner.optim.kinds.kfac import KFAC
from runner.optim.kinds.onebit import OneBitAdam, ZeroOneAdam
from runner.optim.kinds.onebit_lamb import OneBitLamb
from runner.optim.operators import load_operators

__all__ = ["by_name"]


def by_name(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    """The section's optimizer over ``trained``, in one group; defaults of its own where the section has no key."""
    return _MAKERS[config.name](config, trained)


def _common(config: OptimizerConfig) -> dict[str, Any]:
    betas = (config.betas[0], config.betas[1])
    return {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": config.weight_decay}


def _adamw(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    return AdamW(trained, **_common(config))


def _adam(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    return Adam(trained, **_common(config), decoupled_weight_decay=bool(config.decoupled_weight_decay))


def _sgd(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    return SGD(trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _adam8bit(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # kernels that it does without are no news
    from runner.optim.kinds.eight_bits import Adam8bit

    return Adam8bit(trained, **_common(config))


def _adam4bit(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.few_bits import Adam4bit

    return Adam4bit(trained, **_common(config))


def _adam_fp8(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.few_bits import AdamFp8

    return AdamFp8(trained, **_common(config))


def _cpu_adam(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.deepspeed import CPUAdam

    load_operators(["cpu_adam"], accelerator=trained[0].device.type)
    adamw = config.decoupled_weight_decay is not False
    # States have the format of what is updated, as torch's: 16 bits without master weights.
    made: Optimizer = CPUAdam(trained, **_common(config), adamw_mode=adamw, fp32_optimizer_states=False)
    return made


def _fused_adam(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.deepspeed import FusedAdam

    load_operators(["fused_adam"], accelerator=trained[0].device.type)
    return FusedAdam(trained, **_common(config), adam_w_mode=config.decoupled_weight_decay is not False)


def _kfac(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    assert config.damping is not None  # a rule asks for it
    return KFAC(
        trained,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        damping=config.damping,
        **({} if config.refresh_every is None else {"refresh_every": config.refresh_every}),
    )


def _onebit_adam(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    assert config.freeze_step is not None  # a rule asks for it
    return OneBitAdam(trained, **_common(config), freeze_step=config.freeze_step)


def _onebit_lamb(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    assert config.freeze_step is not None  # a rule asks for it
    return OneBitLamb(trained, **_common(config), freeze_step=config.freeze_step)


def _zero_one_adam(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    assert config.freeze_step is not None  # rules ask for both
    assert config.variance_refreshes is not None
    refreshes = config.variance_refreshes
    return ZeroOneAdam(trained, **_common(config), freeze_step=config.freeze_step, refreshes=refreshes)


def _lars(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.large_batch import LARS

    return LARS(trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _lamb(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.large_batch import Lamb

    return Lamb(trained, **_common(config))


def _custom(config: OptimizerConfig, trained: list[Tensor]) -> Optimizer:
    assert config.target is not None  # a rule asks for it
    module, _, name = config.target.partition(":")  # the plan has imported it, and said what is wrong with it
    made = getattr(importlib.import_module(module), name)(trained, lr=config.lr, **config.kwargs)
    if not isinstance(made, Optimizer):
        rule, kind = "must return a torch.optim.Optimizer", type(made).__name__
        raise RequestError([Problem("optimizer.target", config.target, rule, f"It returned a {kind}")])
    return made


_MAKERS: dict[str, Callable[[OptimizerConfig, list[Tensor]], Optimizer]] = {
    "adamw": _adamw,
    "auto": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "adam8bit": _adam8bit,
    "adam4bit": _adam4bit,
    "adam_fp8": _adam_fp8,
    "cpu_adam": _cpu_adam,
    "fused_adam": _fused_adam,
    "kfac": _kfac,
    "onebit_adam": _onebit_adam,
    "onebit_lamb": _onebit_lamb,
    "zero_one_adam": _zero_one_adam,
    "lars": _lars,
    "lamb": _lamb,
    "custom": _custom,
}
