"""Rules of names, functions, data, degrees, schedule and partition, the main parts of a request."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from runner.config.approximations import APPROXIMATIONS
from runner.config.compose.groups import MAY_BE_NULL, OF_USERS, options, shipped_conf
from runner.config.free_keys import FREE_NAMES
from runner.config.precision import PRECISIONS
from runner.config.rules.adapter import ADAPTERS
from runner.config.rules.embedding import EMBEDDINGS
from runner.config.rules.launcher import LAUNCHERS
from runner.config.rules.memory import POLICIES
from runner.config.rules.table import Computed, Row, Table, where
from runner.config.rules.values import (
    TARGET,
    at_least,
    belongs,
    is_given,
    not_negative,
    of_own,
    one_of,
    optional_target,
    rule_of,
    target,
)
from runner.config.schema import BESIDE, SERVICE_LOGGERS, RunConfig
from runner.config.units import parse_bytes
from runner.errors import Problem, did_you_mean
from runner.optim.catalogue.registry import COMPRESSORS, OPTIMIZERS, PREDICTIONS, prediction_of_users, target_problems
from runner.schedule.catalogue.registry import NAMES as SCHEDULES
from runner.schedule.catalogue.registry import OPTIONS

__all__ = ["KNOWN_NAMES", "REQUEST_TABLES"]

# The names that the options of each group may have.
KNOWN_NAMES: dict[str, tuple[str, ...]] = {
    "adapter": ADAPTERS,
    "embedding": EMBEDDINGS,
    "planner": tuple(sorted(options("planner", (shipped_conf(),)), key=lambda name: name != "joint")),
    "partition": ("auto", "uniform", "parameters", "profile", "memory", "manual"),
    "optimizer": tuple(OPTIMIZERS),
    "approximate_backward": tuple(APPROXIMATIONS),
    "kernels": ("none", "eager", "fused", "liger", "substituted"),
    "compression": tuple(COMPRESSORS),
    "weight_prediction": tuple(PREDICTIONS),
    "lr_scheduler": ("constant", "linear", "cosine", "warmup_decay"),
    "precision": tuple(PRECISIONS),
    "activation_checkpoint": POLICIES,
    "launcher": LAUNCHERS,
    "logger": ("tensorboard", "csv", *SERVICE_LOGGERS, "none", "custom"),
    "profiler": ("none", "simple", "cprofile", "pytorch", "nvtx"),
}
_DEVICES = ("auto", "cpu", "cuda")


def _limit_bytes(config: RunConfig) -> float:
    """The memory limit in bytes; infinite if there is none, NaN if it cannot be read."""
    try:
        return math.inf if config.memory_limit is None else parse_bytes(config.memory_limit)
    except ValueError:
        return math.nan


def _with_unit(limit: str) -> str:
    """What is meant by a limit in other tools' units, such as 14M; an example for any other text."""
    letter = limit[-1:].upper()
    is_short = letter in ("K", "M", "G", "T") and limit[:-1].strip().replace(".", "", 1).isdigit()
    return f"{limit}B" if is_short else "8GiB"


def _known_name(group: str) -> Row[RunConfig]:
    """The rule that an option's name is known; if it has a target, every name is allowed."""
    row = one_of(f"{group}.name", KNOWN_NAMES[group])
    if group in OF_USERS:
        row = replace(row, when=lambda c: not is_given(c, f"{group}.target"))
    return where(lambda c: is_given(c, f"{group}.name"), row)[0] if group in MAY_BE_NULL else row


_NAMES: Table[RunConfig] = Table(
    "Names",
    (*(_known_name(group) for group in KNOWN_NAMES), one_of("device", _DEVICES)),
)

_RUN: Table[RunConfig] = Table(
    "The run",
    (
        Row("resume", lambda c: c.resume == "", "must be null, auto or a checkpoint", fix="resume=auto"),
        Row(
            "seed",
            lambda c: not 0 <= c.seed < 2**32,
            "must lie in [0, 2^32)",
            "NumPy takes no other seed",
            fix="seed=0",
        ),
        Row("memory_limit", lambda c: _limit_bytes(c) <= 0, "must be above 0 bytes", fix="memory_limit=8GiB"),
        Row(
            "memory_limit",
            lambda c: math.isnan(_limit_bytes(c)),
            "must be a size such as 80GB, 8GiB, 512MB or a number of bytes",
            fix=lambda c: f"memory_limit={_with_unit(str(c.memory_limit))}",
        ),
        Row(
            "profiler",
            lambda c: c.profiler.name == "nvtx" and c.device == "cpu",
            "must be another with device=cpu",
            "NVTX ranges are those of CUDA's tools",
            fix="profiler=pytorch",
            value=lambda c: c.profiler.name,
        ),
        *optional_target("report"),
        *optional_target("sweep_report"),
        *where(lambda c: is_given(c, "sweep_retry"), one_of("sweep_retry", ("failed",))),
        at_least("sweep_most", 1),
        one_of("sweep_on_failure", ("continue", "stop", "ignore")),
        *optional_target("plan_report"),
    ),
)

_LOSSES = ("cross_entropy", "mse", "rudalle", "token_cross_entropy")

_FUNCTIONS: Table[RunConfig] = Table(
    "Functions of your own",
    (
        *target("model.target"),
        *target("data.target"),
        *target("loss.target"),
        Row(
            "loss.target",
            lambda c: not c.loss.target.startswith("runner."),
            "belongs to loss=custom",
            "The loss {loss.name} calls no function of yours",
            fix="loss=custom",
            when=lambda c: c.loss.name in _LOSSES and isinstance(c.loss.target, str),
        ),
        *where(
            lambda c: c.activation_checkpoint.name == "custom" or c.activation_checkpoint.target is not None,
            *target("activation_checkpoint.target"),
        ),
        *where(lambda c: c.logger.name == "custom", *target("logger.target")),
        Row(
            "logger.others",
            lambda c: not {*c.logger.others} <= {*BESIDE} or c.logger.name in c.logger.others,
            f"must be other ones of {', '.join(BESIDE)}",
            "A logger of your own is the first one, and each is there once",
            fix="logger=[tensorboard,csv]",
        ),
        Row(
            "logger.others",
            lambda c: bool(c.logger.others) and c.logger.name == "none",
            "must be empty with logger=none",
            "none stands for no logger",
            fix="logger=csv",
        ),
        Row(
            "logger.target",
            lambda c: c.logger.target is not None,
            "belongs to logger=custom",
            "The logger {logger.name} calls no function of yours",
            fix="logger=custom",
            when=lambda c: c.logger.name not in ("custom", *SERVICE_LOGGERS),
        ),
    ),
)

_PRETRAINED: Table[RunConfig] = Table(
    "Pretrained weights",
    (
        Row(
            "model.pretrained_strict",
            lambda c: not c.model.pretrained_strict and c.model.pretrained is None,
            "belongs to model.pretrained",
            "Without it every weight is fresh",
            fix="model.pretrained_strict=true",
        ),
        Row(
            "model.pretrained_names",
            lambda c: c.model.pretrained_names is not None and c.model.pretrained is None,
            "belongs to model.pretrained",
            "It maps names of those files",
            fix="model.pretrained_names=null",
        ),
    ),
)

_METRIC_NAME = re.compile(r"[A-Za-z_]\w*")


def _wrong_metrics(config: RunConfig) -> Iterator[Problem]:
    for name, function in config.metrics.items():
        path = f"metrics.{name}"
        if _METRIC_NAME.fullmatch(name) is None:
            why = f"The values are written as val_{name}"
            yield Problem(path, function, "must be named by letters, digits and underscores, no digit first", why)
        elif name == "loss":
            why = "Its values would be written as val_loss, which is the loss itself"
            yield Problem(path, function, "must have another name", why, f"metrics.my_loss={function}")
        if TARGET.fullmatch(function) is None:
            yield Problem(path, function, "must be package.module:function", "A colon parts the module from the name")


_METRICS: Table[RunConfig] = Table(
    "Metrics",
    (
        Computed(
            "metrics",
            _wrong_metrics,
            "each must be metrics.NAME=package.module:function; NAME has letters, digits, underscores, and is not loss",
            "The values are written as val_NAME, and val_loss is the loss",
        ),
    ),
)


def _wrong_callbacks(config: RunConfig) -> Iterator[Problem]:
    for name, asked in config.callbacks.items():
        if TARGET.fullmatch(asked.target) is None:
            rule, why = "must be package.module:Class", "A colon parts the module from the name"
            fix = "callbacks.early_stopping.target=lightning.pytorch.callbacks:EarlyStopping"
            yield Problem(f"callbacks.{name}.target", asked.target, rule, why, fix if name == "early_stopping" else "")


_CALLBACKS: Table[RunConfig] = Table(
    "Callbacks",
    (
        Computed(
            "callbacks",
            _wrong_callbacks,
            "each must be callbacks.NAME.target=package.module:Class",
            "A colon parts the module from the name",
        ),
    ),
)

_DATA: Table[RunConfig] = Table(
    "Data",
    (
        at_least("data.batch_size", 1),
        at_least("data.workers", 0),
        at_least("data.check_every", 1),
        *optional_target("data.collate"),
        Row(
            "loss",
            lambda c: c.loss.name not in ("auto", "custom", "cross_entropy", c.data.goes_with["loss"]),
            "must be the loss that goes with data={data.name}, cross_entropy, auto or custom",
            "Targets that do not count are marked in it, and the weight of a micro-batch is the number of the others",
            fix=lambda c: f"loss={c.data.goes_with['loss']}",
            when=lambda c: "loss" in c.data.goes_with,
        ),
    ),
)


def _unknown_free(config: RunConfig) -> Iterator[Problem]:
    free = config.parallelism.free
    if free == []:
        yield Problem("parallelism.free", "[]", "must name a key", "Nothing would be searched", "parallelism=single")
    for name in dict.fromkeys(free or ()):
        if name not in FREE_NAMES:
            rule = f"must be some of {', '.join(FREE_NAMES)}"
            why = "Nothing else is searched: batch size, precision, optimizer and seed change what is learned"
            near = did_you_mean(name, FREE_NAMES)
            yield Problem("parallelism.free", name, rule, why, f"parallelism.free=[{near}]" if near else "")


_FORM_OF = {"repository": "pipedream", "uniform": "alpa"}
"""The planner that has each form of a model beside its paper's."""

_PARALLELISM: Table[RunConfig] = Table(
    "Degrees",
    (
        Row(
            "parallelism",
            lambda c: c.parallelism.name == "auto",
            "must be typed for `runner train` or `runner plan`",
            "The layout is found first, and all other commands are about a request that has one",
            fix="`runner plan parallelism=auto`, which prints that request",
        ),
        at_least("parallelism.ranks", 1),
        Row(
            "parallelism.ranks",
            lambda c: c.parallelism.ranks is not None and c.parallelism.name != "auto",
            "belongs to parallelism=auto",
            "Other layouts have as many ranks as their degrees say",
            fix="parallelism=auto",
        ),
        Row(
            "planner",
            lambda c: c.planner.name != "joint" and c.parallelism.name != "auto",
            "belongs to parallelism=auto",
            "Other layouts are those that the degrees say",
            fix="parallelism=auto",
        ),
        *optional_target("planner.target"),
        *of_own("planner", "a planner", KNOWN_NAMES["planner"]),
        one_of("planner.form", ("paper", *_FORM_OF)),
        *(
            belongs(
                "planner.form",
                f"planner={owner}",
                "The other planners have no such form of their model",
                fix=f"planner={owner}",
                when=lambda c, form=form, owner=owner: c.planner.form == form and c.planner.name != owner,  # type: ignore[misc]
            )
            for form, owner in _FORM_OF.items()
        ),
        Row(
            "parallelism.free",
            lambda c: c.parallelism.free is not None and c.parallelism.name != "auto",
            "belongs to parallelism=auto",
            "Nothing is searched for other layouts",
            fix="parallelism=auto",
        ),
        Row(
            "parallelism.free",
            lambda c: c.parallelism.free is not None and c.parallelism.name == "auto" and c.planner.name != "joint",
            "must be null with planner={planner.name}",
            "A published planner chooses what its paper chooses",
            fix="planner=joint",
        ),
        Computed(
            "parallelism.free",
            _unknown_free,
            f"must be some of {', '.join(FREE_NAMES)}",
            "Nothing else is searched: batch size, precision, optimizer and seed change what is learned",
        ),
        one_of("parallelism.search", ("quick", "normal", "thorough")),
        at_least("parallelism.pipeline", 1),
        at_least("parallelism.data", 1),
        at_least("parallelism.tensor", 1),
    ),
)

_SCHEDULE: Table[RunConfig] = Table(
    "Schedule",
    (
        *of_own("schedule", "a schedule", (*SCHEDULES, "auto")),
        at_least("schedule.microbatches", 1),
        at_least("schedule.chunks", 1),
        *(rule for owners in OPTIONS.values() for rule in rule_of("schedule", next(iter(owners.values())))),
        at_least("schedule.twin_check_every", 1),
        Row(
            "schedule.post_validation",
            lambda c: c.schedule.post_validation and c.trainer.ema_decay is not None,
            "does not go with trainer.ema_decay",
            "The average would take in weights that may yet be taken back",
            fix="schedule.post_validation=false",
        ),
        at_least("schedule.steps", 1),
    ),
)


def _grow(config: RunConfig) -> bool:
    boundaries = config.partition.boundaries or []
    return all(first < second for first, second in zip([0, *boundaries], boundaries, strict=False))


def _sorted_boundaries(config: RunConfig) -> str:
    return _listed(sorted({each for each in config.partition.boundaries or [] if each > 0}))


def _example_boundaries(config: RunConfig) -> str:
    named = config.schedule.option("replicas") or config.schedule.option("placement") or ()
    stages = len(named) or config.parallelism.pipeline * (config.schedule.chunks or 1)
    return _listed(list(range(1, stages)))


def _listed(numbers: list[int]) -> str:
    return f"partition.boundaries=[{','.join(map(str, numbers))}]"


_PARTITION: Table[RunConfig] = Table(
    "Partition",
    (
        Row(
            "partition.boundaries",
            lambda c: c.partition.boundaries is not None,
            "belong to partition=manual",
            "The partition {partition.name} finds them itself",
            fix="partition=manual",
            when=lambda c: c.partition.name != "manual",
        ),
        Row(
            "partition.boundaries",
            lambda c: c.partition.boundaries is None,
            "must be given",
            "A manual partition cuts where you say",
            fix=_example_boundaries,
            when=lambda c: c.partition.name == "manual",
        ),
        Row(
            "partition.boundaries",
            lambda c: not _grow(c),
            "must grow from entry to entry, from 1 on",
            "Each is the first layer of a stage, and layer 0 starts the first",
            fix=_sorted_boundaries,
            when=lambda c: c.partition.name == "manual",
        ),
    ),
)

_PREDICTION: Table[RunConfig] = Table(
    "Predicted weights",
    (
        *where(lambda c: is_given(c, "weight_prediction.gap"), not_negative("weight_prediction.gap")),
        *of_own("weight_prediction", "a prediction", PREDICTIONS),
        Computed(
            "weight_prediction.target",
            lambda c: target_problems(prediction_of_users, c.weight_prediction),
            "must name a PredictionKind, or a function of a Moment",
        ),
        Row(
            "weight_prediction.preset",
            lambda c: is_given(c, "weight_prediction.preset") and is_given(c, "weight_prediction.gap"),
            "must be null with weight_prediction.gap",
            "Both say how far to look ahead",
            fix="weight_prediction.preset=null",
        ),
    ),
)

REQUEST_TABLES = (
    _NAMES,
    _RUN,
    _FUNCTIONS,
    _PRETRAINED,
    _METRICS,
    _CALLBACKS,
    _DATA,
    _PARALLELISM,
    _SCHEDULE,
    _PARTITION,
    _PREDICTION,
)
"""All tables of this file, in the order in which they are checked."""
