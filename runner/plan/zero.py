"""ZeRO's rules that need a schedule: which pipelines may share out gradients, states and weights."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.schedule.values import Op, Schedule

__all__ = ["schedule_problems"]

_ONE_STAGE = "deepspeed/runtime/engine.py has one optimizer per engine, and clips by its own norm"
_HOOKS = "deepspeed/runtime/zero/stage_1_and_2.py: create_gradient_handling_hooks counts those of one whole backward"


def schedule_problems(config: RunConfig, schedule: Schedule) -> Iterator[Problem]:
    """Why a schedule cannot run with ``zero.stage`` 1, 2 or 3."""
    if not config.zero.stage or schedule.ranks == 1:
        return
    path, name, fix = "schedule.name", schedule.name, "schedule=1f1b"
    rule = f"must be another with zero.stage={config.zero.stage}"
    if any(len(schedule.stages_of(rank)) != 1 for rank in range(schedule.ranks)) or len(schedule.rows) > 1:
        why = f"A rank would hold several stages or replicas ({_ONE_STAGE})"
        yield Problem(path, name, rule, why, fix)
    elif any(action.op in (Op.I, Op.W, Op.R) for actions in schedule.actions for action in actions):
        yield Problem(path, name, rule, f"Its backwards are split, or its forwards run twice ({_HOOKS})", fix)
