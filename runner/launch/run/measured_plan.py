"""Makes the plan of a request with all that can be measured of its model before a run."""

from __future__ import annotations

from runner.config.schema import RunConfig
from runner.plan.values import RunPlan
from runner.profile import ModelProfile

__all__ = ["measured_plan"]


def measured_plan(
    config: RunConfig,
    profile: ModelProfile | None = None,
    *,
    device_memory_bytes: int | None = None,
    cores: int | None = None,
    memory_bytes: int | None = None,
    suggest: bool = False,
    compare: bool = True,
) -> RunPlan:
    """Profile a request's model, plan it, and rehearse what decides in the run.

    Args:
        config: the request, which keeps the rules of its sections.
        profile: the model's profile if it is known already.
        device_memory_bytes, cores, memory_bytes, suggest, compare: see :func:`runner.plan.make.make_plan`.

    Raises:
        RequestError: the model cannot be profiled, or the request has problems.
    """
    from runner.memory.apply.rehearse import rehearse
    from runner.plan.make import make_plan
    from runner.profiling.model import profile_model

    return make_plan(
        config,
        profile_model(config) if profile is None else profile,
        device_memory_bytes=device_memory_bytes,
        cores=cores,
        memory_bytes=memory_bytes,
        profile_of=profile_model,
        rehearse=rehearse,
        suggest=suggest,
        compare=compare,
    )
