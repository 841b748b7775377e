"""Rules of ``partition.migrate``: layers that move between stages while a run trains."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.rules.table import Computed, Row, Table, value_at
from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.optim.catalogue.registry import FUNCTION, OPTIMIZERS, find_optimizer

__all__ = ["MIGRATION_TABLES"]

_FIX = "partition.migrate=null"


def _stays(path: str, needed: object, why: str) -> Row[RunConfig]:
    """The rule that a key has its default value."""
    shown = "null" if needed is None else str(needed).lower()
    rule = f"must be {shown} with partition.migrate"
    return Row(path, lambda c: value_at(c, path) != needed, rule, why, fix=f"{path}={shown}")


_MOVING = tuple(
    name
    for name, kind in OPTIMIZERS.items()
    if name != FUNCTION and not (kind.compresses or kind.watch or kind.state_bytes or kind.operator)
)
"""Optimizers of this package that keep plain tensors for each weight, and nothing else."""


def _keeps_more(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is None or not (kind.by_weight or kind.name in _MOVING)


def _wrong_cuts(config: RunConfig) -> Iterator[Problem]:
    asked = config.partition.migrate or {}
    for step, cut in asked.items():
        if not 1 <= step < config.trainer.max_steps:
            rule = f"must name steps from 1 to trainer.max_steps - 1 = {config.trainer.max_steps - 1}"
            yield Problem(
                "partition.migrate", asked, rule, f"Step {step} is not followed by another one of this run", _FIX
            )
        if any(first >= second for first, second in zip([0, *cut], cut, strict=False)):
            rule = "must have boundaries that grow from entry to entry, from 1 on"
            why = f"Those after step {step} are {cut}; each is the first layer of a stage, and layer 0 starts the first"
            yield Problem("partition.migrate", asked, rule, why, _FIX)


_OFFLOADED = "What is in the host's memory is laid out for the stages of the run's start"

MIGRATION_TABLES: tuple[Table[RunConfig], ...] = (
    Table(
        "Layers that move while a run trains",
        (
            Computed(
                "partition.migrate",
                _wrong_cuts,
                "must name steps of the run, each with boundaries that grow from entry to entry, from 1 on",
                "A cut is that of the steps after so many",
            ),
            Row(
                "parallelism",
                lambda c: c.parallelism.name == "auto",
                "must be named with partition.migrate",
                "The boundaries are those of a number of stages",
                fix="parallelism=pipeline",
            ),
            _stays("parallelism.tensor", 1, "The ranks that divide layers are told of their parts once, at the start"),
            _stays("zero.stage", None, "DeepSpeed lays out the weights and states of a stage once, as one piece"),
            _stays("offload.activations", "none", _OFFLOADED),
            _stays("offload.weights", "none", _OFFLOADED),
            _stays("offload.delay_from", None, "An update that is still to come belongs to all weights of a rank"),
            _stays("compile", False, "A compiled layer keeps to the weights that it was compiled with"),
            _stays(
                "compression.name",
                "none",
                "What it draws and leaves over goes by stages: another cut gives other gradients",
            ),
            _stays("schedule.post_validation", False, "A step that may be taken back would need the layers of before"),
            _stays("approximate_backward.name", "none", "Layers are wrapped for it once, at the start"),
            _stays("trainer.max_epochs", None, "The steps are counted, and those of an epoch are known with the data"),
            Row(
                "hardware.devices",
                lambda c: bool(c.hardware.devices),
                "must be empty with partition.migrate",
                "The order of unlike devices is chosen for one cut",
                fix="hardware.devices=[]",
            ),
            Row(
                "optimizer",
                _keeps_more,
                f"must be one of {', '.join(_MOVING)} with partition.migrate",
                "States of {optimizer.name} are not known to be plain tensors of single weights, which move with them",
                fix="optimizer=adamw",
                value=lambda c: c.optimizer.name,
            ),
        ),
        applies=lambda c: c.partition.migrate is not None,
    ),
)
"""The tables, in the order in which they are checked."""
