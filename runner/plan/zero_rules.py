"""ZeRO's rules that need a schedule: which pipelines may share out gradients, states and weights, and who does it."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.schedule.values import Op, Schedule

__all__ = ["schedule_problems", "shares_by_itself"]

_ONE_STAGE = "deepspeed/runtime/engine.py has one optimizer per engine, and clips by its own norm"
_HOOKS = "deepspeed/runtime/zero/stage_1_and_2.py: create_gradient_handling_hooks counts those of one whole backward"
_BY_WEIGHT = ("adamw", "adam", "sgd", "auto")  # their states can be told apart by weight


def shares_by_itself(config: RunConfig, schedule: Schedule) -> bool:
    """Whether the runner, not DeepSpeed, shares states out: :class:`runner.optim.states.shared.SharedStates`."""
    return bool(config.zero.stage) and _against_deepspeed(schedule) is not None


def schedule_problems(config: RunConfig, schedule: Schedule) -> Iterator[Problem]:
    """Why a schedule cannot run with ``zero.stage`` 1, 2 or 3."""
    against = _against_deepspeed(schedule)
    if not config.zero.stage or against is None:
        return
    rule = f"must be {{}} with schedule={schedule.name}"
    own = f"{against}; there the runner itself shares out the states, and these alone"
    if config.zero.stage != 1:
        yield Problem("zero.stage", config.zero.stage, rule.format(1), own, "zero.stage=1")
    if config.offload.optimizer != "none":
        yield Problem("offload.optimizer", config.offload.optimizer, rule.format("none"), own, "schedule=1f1b")
    if config.zero.config is not None:
        yield Problem("zero.config", config.zero.config, rule.format("null"), own, "zero.config=null")
    if config.optimizer.name not in _BY_WEIGHT:
        allowed = f"one of {', '.join(_BY_WEIGHT)}"
        yield Problem("optimizer.name", config.optimizer.name, rule.format(allowed), own, "optimizer=adamw")
    if PRECISIONS[config.precision.name].master_weights:
        why = f"{own}, not fp32 masters"
        yield Problem("precision.name", config.precision.name, rule.format("another"), why, "precision=bf16_mixed")


def _against_deepspeed(schedule: Schedule) -> str | None:
    """Why DeepSpeed's engine cannot stand in for this schedule's."""
    if schedule.ranks == 1:
        return None
    if any(len(schedule.stages_of(rank)) != 1 for rank in range(schedule.ranks)) or len(schedule.rows) > 1:
        return f"A rank holds several stages or replicas ({_ONE_STAGE})"
    if any(action.op in (Op.I, Op.W, Op.R) for actions in schedule.actions for action in actions):
        return f"Its backwards are split, or its forwards run twice ({_HOOKS})"
    return None
