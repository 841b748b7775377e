"""A plan that is written is read back to the last field, and a file brings nobody else's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_profiles import layer, model
from test_make import PIPELINE, planned, request

from runner.errors import RequestError
from runner.plan.make import make_plan
from runner.plan.values import PLAN_FILE, RunPlan
from runner.schedule.catalogue.registry import SPECS
from runner.schedule.values import Schedule
from runner.stored import read_value, value_text

EVEN = [layer()] * 8
UNEVEN = [layer(), *[layer(forward_seconds=3.0, backward_seconds=6.0)] * 2, *[layer()] * 5]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        (EVEN, {"schedule__name": "auto"}),
        (UNEVEN, {"schedule__name": "auto"}),
        (EVEN, {"schedule__name": "auto", "schedule__asynchronous": "allowed"}),
        (EVEN, {"activation_checkpoint__name": "full"}),
        ([layer(forward_seconds=0.1 + 0.2)] * 8, {}),
    ],
)
def test_a_plan_is_read_back(layers: list[Any], changes: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(model(layers), **PIPELINE | changes)
    plan.save(tmp_path)
    again = RunPlan.load(tmp_path)
    assert again == plan
    assert again.program.schedule is again.schedule  # what was shared is shared
    assert value_text(again) == value_text(plan)


@pytest.mark.costly
def test_every_schedule_is_read_back() -> None:
    kept = []
    for name in SPECS:
        try:
            schedule = planned(model(EVEN), **PIPELINE | {"schedule__name": name}).schedule
        except RequestError:  # one that wants other keys
            continue
        assert read_value(value_text(schedule)) == schedule
        kept.append(name)
    assert len(kept) > len(SPECS) / 2


def test_what_is_not_the_runners_is_neither_written_nor_read() -> None:
    with pytest.raises(TypeError, match="cannot be written"):
        value_text((1, Path("a")))
    for kind in ("pathlib:Path", "runner.files:write_atomically", "os:system"):
        document = {"kinds": [[kind]], "objects": [[0]], "value": {"is": 0}}
        with pytest.raises(ValueError, match="no class of|not a value of this version"):
            read_value(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kinds": [], "objects": [], "value": {"is": 7}}'])
def test_a_damaged_file_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"is damaged, or of another version|holds no plan"):
        RunPlan.load(tmp_path)


def test_a_field_that_an_older_file_lacks_has_its_default() -> None:
    schedule = make_plan(request(**PIPELINE), model(EVEN)).schedule
    document = json.loads(value_text(schedule))
    (kind,) = [kind for kind in document["kinds"] if kind[0].endswith(":Schedule")]
    dropped = kind.index("joined")
    del kind[dropped]
    for row in document["objects"]:
        if row[0] == document["kinds"].index(kind):
            del row[dropped]
    again = read_value(json.dumps(document))
    assert isinstance(again, Schedule)
    assert again == schedule


def test_a_function_is_its_name_and_nobody_elses_is_read() -> None:
    from runner.optim.catalogue.drift import DRIFT

    assert read_value(value_text(DRIFT)).predict is DRIFT.predict
    with pytest.raises(TypeError, match="cannot be written"):
        value_text((lambda: None,))
    for name in ("os:system", "runner.stored:_OWN"):
        document = {"kinds": [], "objects": [], "value": {"function": name}}
        with pytest.raises(ValueError, match="no class of|no function"):
            read_value(json.dumps(document))
