"""Rules of the optimizer and its learning rate: keys that mean nothing to it, what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.optimizers import OPTIMIZERS, OptimizerKind
from runner.config.rules.numbers import at_least, not_negative, positive
from runner.config.schema import RunConfig
from runner.errors import Problem

__all__ = ["lr_scheduler_rules", "optimizer_rules"]

_LAMB_WARM_UP = 10  # steps: 1 / (1 - 0.9), the running mean's; runner/optim/kinds/onebit_lamb.py


def optimizer_rules(config: RunConfig) -> Iterator[Problem]:
    """Every rule of the section that is broken."""
    optimizer = config.optimizer
    yield from positive("optimizer.lr", optimizer.lr, "0.001")
    yield from positive("optimizer.eps", optimizer.eps, "1e-8")
    yield from not_negative("optimizer.weight_decay", optimizer.weight_decay)
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        fix = "optimizer.betas=[0.9,0.999]"
        yield Problem("optimizer.betas", optimizer.betas, "must be two numbers in [0, 1)", fix=fix)
    if not 0 <= optimizer.momentum < 1:
        yield Problem("optimizer.momentum", optimizer.momentum, "must lie in [0, 1)", fix="optimizer.momentum=0.9")
    kind = OPTIMIZERS.get(optimizer.name)
    if kind is not None:
        yield from _unread_keys(config, kind)
        yield from _weight_decay(config, kind)
        yield from _compression(config, kind)
        yield from _refreshes(config)
        yield from _curvature(config, kind)
        yield from _own_function(config)


def _own_function(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.name != "custom":
        for key, value in (("target", optimizer.target), ("kwargs", optimizer.kwargs)):
            if value:
                why = f"{optimizer.name} calls no function of yours"
                yield Problem(f"optimizer.{key}", value, "belongs to optimizer=custom", why, "optimizer=custom")
        return
    if optimizer.target is None:
        why, fix = "The option custom calls your own function", "optimizer.target=package.module:function"
        yield Problem("optimizer.target", None, "must be given", why, fix)
    if optimizer.weight_decay:
        why, fix = "Your function is called with lr and its kwargs alone", "+optimizer.kwargs.weight_decay=0.1"
        path = "optimizer.weight_decay"
        yield Problem(path, optimizer.weight_decay, "must be 0 with optimizer=custom", why, fix)


def _unread_keys(config: RunConfig, kind: OptimizerKind) -> Iterator[Problem]:
    optimizer, default = config.optimizer, type(config.optimizer)()
    if "momentum" not in kind.reads and optimizer.momentum != default.momentum:
        why = f"It has no meaning for {optimizer.name}"
        rule = "belongs to optimizer=sgd, lars or kfac"
        yield Problem("optimizer.momentum", optimizer.momentum, rule, why, "optimizer.momentum=0")
    if "betas" not in kind.reads and optimizer.betas != default.betas:
        why = f"They have no meaning for {optimizer.name}"
        fix = "optimizer.betas=[0.9,0.999]"
        yield Problem("optimizer.betas", optimizer.betas, "belong to adam and adamw", why, fix)
    if "eps" not in kind.reads and optimizer.eps != default.eps:
        why = f"It has no meaning for {optimizer.name}"
        yield Problem("optimizer.eps", optimizer.eps, "belongs to adam and adamw", why, "optimizer.eps=1e-8")


def _weight_decay(config: RunConfig, kind: OptimizerKind) -> Iterator[Problem]:
    asked = config.optimizer.decoupled_weight_decay
    if kind.decoupled is not None and asked is not None and asked != kind.decoupled:
        path, own = "optimizer.decoupled_weight_decay", str(kind.decoupled).lower()
        why = f"{config.optimizer.name} knows no other weight decay"
        yield Problem(path, asked, f"must be {own} for {config.optimizer.name}", why, f"{path}={own}")


def _compression(config: RunConfig, kind: OptimizerKind) -> Iterator[Problem]:
    freeze, path = config.optimizer.freeze_step, "optimizer.freeze_step"
    if not kind.compresses:
        if freeze is not None:
            why = f"{config.optimizer.name} exchanges whole gradients at every step"
            rule = "belongs to optimizer=onebit_adam, zero_one_adam or onebit_lamb"
            yield Problem(path, freeze, rule, why, f"{path}=null")
        return
    if freeze is None:
        yield Problem(path, None, "must be given", "The variance stays from this step on", f"{path}=100")
    if config.optimizer.name == "onebit_lamb" and freeze is not None and freeze < _LAMB_WARM_UP:
        why = f"A tensor's rate after it is a running mean from nothing, over about {_LAMB_WARM_UP} steps"
        yield Problem(path, freeze, f"must be at least {_LAMB_WARM_UP} with onebit_lamb", why, f"{path}=100")
    else:
        yield from at_least(path, freeze, 1)
    local = "After freezing replicas exchange momentum, and no rank has the sum of gradients"
    for key in ("grad_clip_norm", "grad_clip_value"):
        value = getattr(config.trainer, key)
        if value is not None:
            rule = f"must be null with optimizer={config.optimizer.name}"
            yield Problem(f"trainer.{key}", value, rule, local, f"trainer.{key}=null")
    if config.schedule.post_validation:
        why = "An update that may be taken back would need a copy of what compression left over"
        fix = "schedule.post_validation=false"
        rule = f"must be false with optimizer={config.optimizer.name}"
        yield Problem("schedule.post_validation", True, rule, why, fix)


def _refreshes(config: RunConfig) -> Iterator[Problem]:
    refreshes, path, name = config.optimizer.variance_refreshes, "optimizer.variance_refreshes", config.optimizer.name
    if name == "zero_one_adam" and refreshes is None:
        why = "After so many refreshes of the variance the interval between them doubles"
        yield Problem(path, None, "must be given", why, f"{path}=16")
    elif name != "zero_one_adam" and refreshes is not None:
        why = f"{name} has no steps that refresh the variance between others"
        yield Problem(path, refreshes, "belongs to optimizer=zero_one_adam", why, f"{path}=null")
    yield from at_least(path, refreshes, 1)


def _curvature(config: RunConfig, kind: OptimizerKind) -> Iterator[Problem]:
    """Keys of K-FAC, and what its factors cannot be taken under."""
    optimizer = config.optimizer
    if kind.curvature and optimizer.damping is None:
        path = "optimizer.damping"
        yield Problem(path, None, "must be given", "Factors are damped and inverted", f"{path}=1e-3")
    for key, value in (("damping", optimizer.damping), ("refresh_every", optimizer.refresh_every)):
        path = f"optimizer.{key}"
        if not kind.curvature and value is not None:
            why = f"{optimizer.name} keeps no factors"
            yield Problem(path, value, "belongs to optimizer=kfac", why, f"{path}=null")
    if not kind.curvature:
        return
    if optimizer.damping is not None:
        yield from positive("optimizer.damping", optimizer.damping, "1e-3")
    yield from at_least("optimizer.refresh_every", optimizer.refresh_every, 1)
    seen = "Its factors are sums over what the layers of one process are given in a forward and a backward"
    refused: tuple[tuple[str, object, object, str], ...] = (
        ("parallelism.data", config.parallelism.data, 1, "and replicas see other samples"),
        ("zero.stage", config.zero.stage, None, "and DeepSpeed runs them itself"),
        ("precision.name", config.precision.name, "fp32", "in fp32, as are their inverses"),
        ("compile", config.compile, False, "and compiled layers call no hooks"),
        ("activation_checkpoint.name", config.activation_checkpoint.name, "none", "whose inputs would stay"),
        ("offload.activations", config.offload.activations, "none", "whose inputs would stay on the device"),
        ("schedule.post_validation", config.schedule.post_validation, False, "which could not be taken back"),
    )
    for path, found, needed, because in refused:
        if found != needed:
            shown = "null" if needed is None else str(needed).lower()
            fix = f"{path.removesuffix('.name')}={shown}"
            yield Problem(path, found, f"must be {shown} with optimizer={optimizer.name}", f"{seen}, {because}", fix)


def lr_scheduler_rules(config: RunConfig) -> Iterator[Problem]:
    section = config.lr_scheduler
    yield from at_least("lr_scheduler.warmup_steps", section.warmup_steps, 0)
    yield from at_least("lr_scheduler.total_steps", section.total_steps, 1)
    yield from not_negative("lr_scheduler.min_lr", section.min_lr)
    yield from at_least("lr_scheduler.base_batch", section.base_batch, 1)
    if section.name == "constant":
        default = type(section)()
        for key in ("warmup_steps", "min_lr", "total_steps"):
            value, unset = getattr(section, key), getattr(default, key)
            if value != unset:
                why = "The constant schedule keeps optimizer.lr at every step"
                yield Problem(
                    f"lr_scheduler.{key}",
                    value,
                    "belongs to a schedule that changes the rate",
                    why,
                    "lr_scheduler=linear",
                )
        return
    total, path = section.total_steps, "lr_scheduler.total_steps"
    if total is None:
        total, path = config.trainer.max_steps, "trainer.max_steps"
    if total >= 1 and section.warmup_steps > total:
        why = f"The decay ends at step {total} ({path})"
        fix = f"lr_scheduler.warmup_steps={total}"
        yield Problem("lr_scheduler.warmup_steps", section.warmup_steps, f"must be at most {total}", why, fix)
    if section.base_batch is None and section.min_lr > config.optimizer.lr > 0:
        why = f"The rate falls from optimizer.lr = {config.optimizer.lr}"
        yield Problem(
            "lr_scheduler.min_lr", section.min_lr, "must be at most optimizer.lr", why, "lr_scheduler.min_lr=0"
        )
