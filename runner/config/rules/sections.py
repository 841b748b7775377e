"""Rules over the sections of a request: pure functions that return every broken one.

Rules that need a schedule or a topology are the schedule's and the plan's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from runner.config.compose.shape import MISSING
from runner.config.deepspeed_file import file_problems
from runner.config.optimizers import OPTIMIZERS
from runner.config.precision import PRECISIONS
from runner.config.rules.launcher import LAUNCHERS, launcher_rules
from runner.config.rules.memory import POLICIES, memory_rules
from runner.config.rules.numbers import at_least, not_negative, positive
from runner.config.rules.optimizer import lr_scheduler_rules, optimizer_rules
from runner.config.rules.zero_table import zero_rules
from runner.config.schema import RunConfig
from runner.config.units import parse_bytes
from runner.errors import Problem, did_you_mean

__all__ = ["KNOWN_NAMES", "NEVER_CALLED", "rules"]

# Names that decide what runs; the options of each group have these and no others.
KNOWN_NAMES: dict[str, tuple[str, ...]] = {
    "partition": ("uniform", "parameters", "profile", "memory", "manual"),
    "optimizer": tuple(OPTIMIZERS),
    "lr_scheduler": ("constant", "linear", "cosine", "warmup_decay"),
    "precision": tuple(PRECISIONS),
    "activation_checkpoint": POLICIES,
    "launcher": LAUNCHERS,
    "logger": ("tensorboard", "csv", "none", "custom"),
    "profiler": ("none", "simple", "pytorch"),
}
_ON_NONFINITE = ("stop", "skip")
_DEVICES = ("auto", "cpu", "cuda")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
NEVER_CALLED = ("sys", "os", "posix", "nt")
"""Modules of which torch.load calls nothing, whatever it is told (torch 2.13, torch/_weights_only_unpickler.py)."""

_NOT_YET = "not available in this version"


def rules(config: RunConfig) -> list[Problem]:
    """Every rule that ``config`` breaks, in the order of its sections."""
    return [problem for rule in _RULES for problem in rule(config)]


def _known(path: str, value: str, known: tuple[str, ...]) -> Iterator[Problem]:
    if value not in known:
        near = did_you_mean(value, known) or known[0]
        yield Problem(path, value, f"must be one of {', '.join(known)}", fix=f"{path.removesuffix('.name')}={near}")


def _names(config: RunConfig) -> Iterator[Problem]:
    for group, known in KNOWN_NAMES.items():
        yield from _known(f"{group}.name", getattr(config, group).name, known)
    yield from _known("device", config.device, _DEVICES)


def _top_level(config: RunConfig) -> Iterator[Problem]:
    if config.resume == "":
        yield Problem("resume", config.resume, "must be null, auto or a checkpoint", fix="resume=auto")
    if not 0 <= config.seed < 2**32:
        yield Problem("seed", config.seed, "must lie in [0, 2^32)", "NumPy takes no other seed", "seed=0")
    if config.memory_limit is not None:
        yield from _memory_limit(config.memory_limit)
    if config.report is not None:
        yield from _target("report", config.report)
    if config.sweep_report is not None:
        yield from _target("sweep_report", config.sweep_report)
    if config.sweep_retry is not None:
        yield from _known("sweep_retry", config.sweep_retry, ("failed",))
    yield from _known("sweep_on_failure", config.sweep_on_failure, ("continue", "stop", "ignore"))
    if config.plan_report is not None:
        yield from _target("plan_report", config.plan_report)


def _memory_limit(text: str) -> Iterator[Problem]:
    try:
        if parse_bytes(text) > 0:
            return
        rule = "must be above 0 bytes"
    except ValueError:
        rule = "must be a size such as 80GB, 8GiB, 512MB or a number of bytes"
    yield Problem("memory_limit", text, rule, fix="memory_limit=8GiB")


def _target(path: str, value: str | None) -> Iterator[Problem]:
    if value is None or value == MISSING:
        yield Problem(
            path, value, "must be given", "The option custom calls your own function", f"{path}=package.module:function"
        )
    elif _TARGET.fullmatch(value) is None:
        module, _, function = value.rpartition(".")
        dotted = re.fullmatch(r"\w+(\.\w+)+", value) is not None
        fix = f"{path}={module}:{function}" if dotted else f"{path}=package.module:function"
        yield Problem(path, value, "must be package.module:function", "A colon parts the module from the name", fix)


def _targets(config: RunConfig) -> Iterator[Problem]:
    yield from _target("model.target", config.model.target)
    yield from _target("data.target", config.data.target)
    yield from _target("loss.target", config.loss.target)
    if config.logger.name == "custom":
        yield from _target("logger.target", config.logger.target)
    elif config.logger.target is not None:
        why = f"The logger {config.logger.name} calls no function of yours"
        yield Problem("logger.target", config.logger.target, "belongs to logger=custom", why, "logger=custom")


def _data(config: RunConfig) -> Iterator[Problem]:
    yield from at_least("data.batch_size", config.data.batch_size, 1)
    yield from at_least("data.workers", config.data.workers, 0)
    if config.data.collate is not None:
        yield from _target("data.collate", config.data.collate)


def _parallelism(config: RunConfig) -> Iterator[Problem]:
    yield from at_least("parallelism.pipeline", config.parallelism.pipeline, 1)
    yield from at_least("parallelism.data", config.parallelism.data, 1)
    yield from at_least("parallelism.tensor", config.parallelism.tensor, 1)
    if config.parallelism.tensor > 1:
        why = f"Tensor parallelism is {_NOT_YET}"
        yield Problem("parallelism.tensor", config.parallelism.tensor, "must be 1", why, "parallelism.tensor=1")


def _schedule(config: RunConfig) -> Iterator[Problem]:
    schedule = config.schedule
    yield from at_least("schedule.microbatches", schedule.microbatches, 1)
    yield from at_least("schedule.chunks", schedule.chunks, 1)
    yield from at_least("schedule.memory_limit", schedule.memory_limit, 1)
    yield from at_least("schedule.pipes", schedule.pipes, 1)
    yield from at_least("schedule.twin_check_every", schedule.twin_check_every, 1)
    if schedule.post_validation and config.trainer.ema_decay is not None:
        why = "The average would take in weights that may yet be taken back"
        fix = "schedule.post_validation=false"
        yield Problem("schedule.post_validation", True, "does not go with trainer.ema_decay", why, fix)
    yield from at_least("schedule.steps", schedule.steps, 1)
    if (schedule.steps or 1) > 1 and not schedule.post_validation:
        why = "Without it all ranks wait for each other before the optimizer step: every step looks like the first"
        rule = "needs schedule.post_validation=true"
        yield Problem("schedule.steps", schedule.steps, rule, why, "schedule.post_validation=true")
    if schedule.name == "from_file" and schedule.file is None:
        yield Problem("schedule.file", None, "must name a file", "The schedule is read from it", "schedule.file=PATH")
    if schedule.name != "from_file" and schedule.file is not None:
        why = f"The schedule {schedule.name} is generated"
        yield Problem("schedule.file", schedule.file, "belongs to schedule=from_file", why, "schedule=from_file")


def _partition(config: RunConfig) -> Iterator[Problem]:
    boundaries, name = config.partition.boundaries, config.partition.name
    stages = config.parallelism.pipeline * (config.schedule.chunks or 1)
    path = "partition.boundaries"
    if name != "manual":
        if boundaries is not None:
            why = f"The partition {name} finds them itself"
            yield Problem(path, boundaries, "belong to partition=manual", why, "partition=manual")
        return
    if boundaries is None:
        why = "A manual partition cuts where you say"
        yield Problem(path, None, "must be given", why, f"{path}={_example(stages)}")
        return
    if any(first >= second for first, second in zip([0, *boundaries], boundaries, strict=False)):
        ordered = sorted({each for each in boundaries if each > 0})
        why = "Each is the first layer of a stage, and layer 0 starts the first"
        yield Problem(path, boundaries, "must grow from entry to entry, from 1 on", why, f"{path}={_list(ordered)}")


def _example(stages: int) -> str:
    return _list(list(range(1, stages)))


def _list(numbers: list[int]) -> str:
    return "[" + ",".join(map(str, numbers)) + "]"


def _not_available(config: RunConfig) -> Iterator[Problem]:
    if config.compression.name != "none":
        why = f"Compression is {_NOT_YET}"
        yield Problem("compression.name", config.compression.name, "must be none", why, "compression=none")


def _precision(config: RunConfig) -> Iterator[Problem]:
    section = config.precision
    known = PRECISIONS.get(section.name)
    if known is None:
        return
    if not known.loss_scaling:
        yield from _unused_scaling(config)
        return
    yield from positive("precision.initial_scale", section.initial_scale, "65536")
    yield from positive("precision.minimum_scale", section.minimum_scale, "1e-7")
    yield from at_least("precision.growth_interval", section.growth_interval, 1)
    if not 1 <= section.growth_factor < math.inf:
        fix = "precision.growth_factor=2"
        yield Problem("precision.growth_factor", section.growth_factor, "must be a finite number, 1 or above", fix=fix)
    if not 0 < section.backoff_factor < 1:
        fix = "precision.backoff_factor=0.5"
        yield Problem("precision.backoff_factor", section.backoff_factor, "must lie in (0, 1)", fix=fix)
    if section.minimum_scale > section.initial_scale > 0:
        why = f"The scale starts at precision.initial_scale = {section.initial_scale}"
        fix = f"precision.minimum_scale={section.initial_scale}"
        yield Problem(
            "precision.minimum_scale", section.minimum_scale, "must be at most precision.initial_scale", why, fix
        )


def _unused_scaling(config: RunConfig) -> Iterator[Problem]:
    section = config.precision
    default = type(section)()
    for key in ("initial_scale", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale"):
        value, unset = getattr(section, key), getattr(default, key)
        if value != unset:
            scaled = [name for name, known in PRECISIONS.items() if known.loss_scaling]
            why = f"The precision {section.name} has the range of fp32, so that its loss is not scaled"
            yield Problem(f"precision.{key}", value, f"belongs to {' and '.join(scaled)}", why, "precision=fp16")


def _trainer(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    yield from at_least("trainer.max_steps", trainer.max_steps, 1)
    yield from at_least("trainer.val_every", trainer.val_every, 1)
    yield from at_least("trainer.log_every", trainer.log_every, 1)
    yield from at_least("trainer.threads", trainer.threads, 1)
    yield from positive("trainer.grad_clip_norm", trainer.grad_clip_norm, "1.0")
    yield from positive("trainer.grad_clip_value", trainer.grad_clip_value, "1.0")
    if trainer.grad_clip_norm is not None and trainer.grad_clip_value is not None:
        why = f"Gradients are clipped by one rule, and trainer.grad_clip_norm = {trainer.grad_clip_norm}"
        fix = "trainer.grad_clip_value=null"
        yield Problem(
            "trainer.grad_clip_value", trainer.grad_clip_value, "must be null beside a largest norm", why, fix
        )
    yield from _known("trainer.on_nonfinite", trainer.on_nonfinite, _ON_NONFINITE)
    if trainer.ema_decay is not None and not 0 < trainer.ema_decay < 1:
        fix = "trainer.ema_decay=0.999"
        yield Problem("trainer.ema_decay", trainer.ema_decay, "must lie in (0, 1)", fix=fix)


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    yield from at_least("checkpoint.every", checkpoint.every, 1)
    yield from at_least("checkpoint.keep", checkpoint.keep, 1)
    yield from at_least("checkpoint.keep_best", checkpoint.keep_best, 0)
    if checkpoint.keep_best > 0 and config.trainer.val_every is None:
        why = "Checkpoints are compared by the validation at their step, and there is one at the end only"
        rule = "must be 0 without trainer.val_every"
        yield Problem("checkpoint.keep_best", checkpoint.keep_best, rule, why, "trainer.val_every=100")
    for name in checkpoint.allow_pickle:
        if _TARGET.fullmatch(name) is None:
            rule = "each must be package.module:name of a class or function"
            yield Problem("checkpoint.allow_pickle", name, rule, fix="checkpoint.allow_pickle=[]")
        elif name.partition(":")[0] in NEVER_CALLED:
            why = f"torch.load calls nothing of {', '.join(NEVER_CALLED)} (torch/_weights_only_unpickler.py)"
            yield Problem("checkpoint.allow_pickle", name, "cannot be allowed", why, "checkpoint.allow_pickle=[]")


def _machine(config: RunConfig) -> Iterator[Problem]:
    hardware, transport = config.hardware, config.transport
    for precision, flops in hardware.flops.items():
        yield from positive(f"hardware.flops.{precision}", flops, "1e12")
    for key, fix in (("memory_bytes", "8e9"), ("host_memory_bytes", "1e12")):
        size = getattr(hardware, key)
        yield from positive(f"hardware.{key}", size, fix)
        if size is not None and 0 < size < 1:
            yield Problem(f"hardware.{key}", size, "must be at least 1 byte", fix=f"hardware.{key}={fix}")
    for name in ("link", "memory", "network", "host_link", "host_memory"):
        key = f"{name}_bytes_per_second"
        yield from positive(f"hardware.{key}", getattr(hardware, key), "1e9")
    yield from positive("hardware.devices_per_node", hardware.devices_per_node, "8")
    yield from not_negative("hardware.link_latency_seconds", hardware.link_latency_seconds)
    yield from not_negative("transport.delay_seconds", transport.delay_seconds)
    yield from positive("transport.bytes_per_second", transport.bytes_per_second, "1e9")
    for key in ("F", "B", "I", "W", "comm", "curvature", "inversion"):
        yield from not_negative(f"cost.{key}", getattr(config.cost, key))
    if config.cost.F == config.cost.B == 0:
        yield Problem("cost.F", 0, "must be above 0 where cost.B is 0", "Nothing would take any time", "cost.F=1")


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _names,
    _top_level,
    _targets,
    _data,
    _parallelism,
    _schedule,
    _partition,
    _not_available,
    memory_rules,
    zero_rules,
    file_problems,
    optimizer_rules,
    lr_scheduler_rules,
    _precision,
    _trainer,
    _checkpoint,
    _machine,
    launcher_rules,
)
