"""What a run repeats of its plan's notes, in three lines at most."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from runner.config.compose.resolve import resolve
from runner.launch.run.prepare import tell_plan
from runner.plan.cautions import Caution, told
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profiling.model import profile_model


def _plan(*overrides: str, cores: int | None = None) -> RunPlan:
    config = resolve(["model=mlp", "device=cpu", *overrides])
    return make_plan(config, profile_model(config), cores=cores)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "late"),
    [
        (("schedule=pipedream_2bw", "parallelism.pipeline=2", "schedule.microbatches=4"), "up to 1 step;"),
        (("schedule=pipedream", "parallelism.pipeline=4", "schedule.microbatches=1"), "up to 3 steps;"),
        (("schedule=hetpipe", "parallelism.pipeline=1", "parallelism.data=2", "schedule.wave=2"), "up to 1 step;"),
        (("schedule=1f1b", "parallelism.pipeline=2", "schedule.microbatches=4"), ""),
    ],
)
def test_weights_that_lack_steps_are_told(overrides: tuple[str, ...], late: str) -> None:
    plan = _plan(*overrides)
    notes = [each.line for each in plan.cautions if each.about == "learning"]
    assert [late in note for note in notes] == ([True] if late else [])
    assert list(plan.advice[: len(notes)]) == notes, "the plan has them, too, and first"


@pytest.mark.costly
@pytest.mark.parametrize("option", ["compression=topk", "approximate_backward=fewbit"])
def test_gradients_that_are_approximate_are_told(option: str) -> None:
    plan = _plan(option, "parallelism.data=2")
    (note,) = [each.line for each in plan.cautions if each.about == "learning"]
    assert note.startswith(f"{option}: ")
    assert not [each for each in _plan("parallelism.data=2").cautions if each.about == "learning"]


def test_a_pipeline_that_does_not_pay_is_told_by_the_run(caplog: pytest.LogCaptureFixture) -> None:
    naive = resolve(["model=mlp", "device=cpu", "parallelism.pipeline=4", "schedule=naive", "schedule.microbatches=4"])
    known = profile_model(naive)
    layers = [replace(each, forward_seconds=0.01, backward_seconds=0.02) for each in known.layers]
    plan = make_plan(naive, replace(known, layers=tuple(layers), seconds_source="measured"), cores=2)
    assert [each.about for each in plan.cautions] == ["pipeline", "cores"]
    with caplog.at_level(logging.INFO, "runner"):
        tell_plan(plan)
    _, *notes = caplog.messages
    assert notes == [f"note: {each.line}" for each in plan.cautions]
    caplog.clear()
    with caplog.at_level(logging.INFO, "runner"):
        tell_plan(plan, about=("cores",))
    assert caplog.messages[1:] == notes[1:]


def test_many_notes_are_three_lines() -> None:
    many = [Caution("learning", f"note {number}") for number in range(5)]
    assert told([Caution("cores", "a"), Caution("learning", "b")]) == ["note: b", "note: a"]
    assert told(many[:3]) == ["note: note 0", "note: note 1", "note: note 2"]
    assert told(many) == [
        "note: note 0",
        "note: note 1",
        "note: 3 more notes: `runner plan` with the same request has them",
    ]
