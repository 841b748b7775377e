"""Every optimizer, precision and stage of ZeRO: a plan, or a refusal that says what to try."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
from covering import sampled
from plan_profiles import layer, model

from runner.config.compose.resolve import resolve
from runner.config.precision import PRECISIONS
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import OPTIMIZERS
from runner.plan.make import make_plan

STAGES = (None, 0, 1, 2, 3)
PROFILE = model([layer()] * 4)
TARGET = {"custom": ["optimizer.target=torch.optim:SGD"]}


@cache
def resolved(*overrides: str) -> RunConfig:
    return resolve(["model=mlp", "parallelism.data=2", *overrides])


def asked(name: str, precision: str, stage: int | None) -> RunConfig:
    """Sections of two requests and a number put together, because to resolve hundreds of requests takes minutes."""
    config = deepcopy(resolved(f"optimizer={name}", *TARGET.get(name, [])))
    config.precision = resolved(f"precision={precision}").precision
    config.zero.stage = stage
    if name == "cpu_adam" and stage:
        config.offload.optimizer = "cpu"  # it brings this where states are shared out
    return config


@pytest.mark.costly
@pytest.mark.parametrize("name", sampled(OPTIMIZERS, *list(OPTIMIZERS)[::3]))
def test_a_plan_or_a_refusal(name: str) -> None:
    for precision in PRECISIONS:
        for stage in STAGES:
            config = asked(name, precision, stage)
            problems = rules(config)
            whole = stage in (None, 0)
            if problems:
                assert {problem.path for problem in problems} <= {
                    "optimizer.name",
                    "offload.optimizer",
                    "parallelism.data",
                    "precision.name",
                    "zero.stage",
                }, problems
                assert all(problem.fix for problem in problems)
                continue
            assert whole or OPTIMIZERS[name].elementwise
            assert name != "cpu_adam" or not whole
            plan = make_plan(config, PROFILE)
            assert plan.problems == ()
            assert max(plan.memory.peak_bytes) > 0
