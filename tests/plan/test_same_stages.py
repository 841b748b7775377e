"""A resumed run has the stages of the run before, although measured seconds are others each time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_profiles import layer, model
from test_make import PIPELINE, planned, request
from test_pipefisher_plan import ASKED, fills

from runner.launch.run.same_stages import with_stages_before
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profile import ModelProfile


def _before(directory: Path, plan: RunPlan) -> str:
    """A run that had this plan; the path of its checkpoint."""
    plan.save(directory)
    return str(directory / "checkpoints" / "step-3.ckpt")


def _slow_first(factor: float) -> ModelProfile:
    return model([layer(forward_seconds=factor, backward_seconds=2 * factor), *[layer()] * 7])


def _again(
    directory: Path, then: ModelProfile, now: ModelProfile, **overrides: Any
) -> tuple[RunPlan, RunPlan, RunPlan]:
    """The plans before and now, and that of the resumed run."""
    before, plan = planned(then, **overrides), planned(now, **overrides)
    config = replace(request(**overrides), resume=_before(directory, before))
    return before, plan, with_stages_before(config, plan)


def test_the_stages_are_those_before(tmp_path: Path) -> None:
    before, now, resumed = _again(tmp_path, _slow_first(5.0), _slow_first(1.0), **PIPELINE)
    assert before.partition != now.partition
    assert resumed.partition == before.partition
    assert resumed.profile == now.profile  # what is predicted is of today's seconds


def test_an_asynchronous_run_without_a_plan_of_before_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = planned(_slow_first(1.0), **PIPELINE | {"schedule__name": "pipedream"})
    config = replace(request(**PIPELINE | {"schedule__name": "pipedream"}), resume=str(tmp_path / "checkpoints" / "a"))
    assert with_stages_before(config, plan) is plan
    assert "the stages are planned anew, which may give other losses" in caplog.text


def test_work_in_bubbles_lies_where_it_lay(tmp_path: Path) -> None:
    then, now = (model([layer(fills=fills(0.5, inversions))] * 4) for inversions in (1.5, 9.0))
    before, plan, resumed = _again(tmp_path, then, now, **ASKED)
    assert before.schedule != plan.schedule
    assert resumed.schedule == before.schedule


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism__pipeline": 2},
        {"partition": "uniform"},
        {"schedule": "auto"},
    ],
)
def test_another_request_has_its_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = _before(tmp_path, planned(_slow_first(5.0), **PIPELINE))
    config = replace(request(**PIPELINE | changes), resume=path)
    plan = make_plan(config, _slow_first(1.0))
    assert with_stages_before(config, plan) is plan


def test_a_checkpoint_alone_says_nothing_of_stages(tmp_path: Path) -> None:
    plan = planned(**PIPELINE)
    config = request(**PIPELINE)
    assert with_stages_before(config, plan) is plan
    assert with_stages_before(replace(config, resume=str(tmp_path / "x" / "step-3.ckpt")), plan) is plan


def test_stages_that_do_not_fit_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _before(tmp_path, planned(_slow_first(50.0), **PIPELINE))
    config = replace(request(**PIPELINE), resume=path)
    plan = make_plan(config, _slow_first(1.0))
    config.memory_limit = str(max(plan.memory.peak_bytes) + 1)
    assert with_stages_before(config, plan) is plan
    assert "would not fit here" in caplog.text
