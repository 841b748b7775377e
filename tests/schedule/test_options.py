"""A schedule's own keys stand in its entry alone: the schema, the help and the rules take them from there."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from runner.cli.request import checked
from runner.config.schema import ScheduleConfig
from runner.errors import Problem, RequestError
from runner.schedule import SPECS, build
from runner.schedule.catalogue.registry import OPTIONS, ScheduleRequest, request_problems

OWNED = [(name, option) for key, owners in OPTIONS.items() for name, option in owners.items()]
_SIZES = list(product((2, 4), (2, 4, 6, 8)))


def problems(name: str, ranks: int, microbatches: int, **options: object) -> list[Problem]:
    return request_problems(name, ScheduleRequest(ranks, microbatches, options=options))


def test_the_section_has_every_key_with_what_it_means_for_each_schedule() -> None:
    told = {field.name: field.metadata.get("about", "") for field in fields(ScheduleConfig)}
    for name, option in OWNED:
        assert name in told[option.key]
        assert option.about in told[option.key]
    assert ScheduleConfig().given == {}


def test_values_for_tests_are_legal_for_some_layout() -> None:
    for name, option in OWNED:
        for value in option.legal:
            options: dict[str, Any] = {option.key: value}
            assert any(not problems(name, *size, **options) for size in _SIZES), option.key


def test_other_schedules_say_why_they_have_no_use_for_a_key() -> None:
    for key, owners in OPTIONS.items():
        (problem,) = problems("zb_h1", 2, 4, **{key: "x"})
        assert problem.path == f"schedule.{key}"
        assert problem.rule == f"applies to schedule={' or '.join(owners)} only"
        assert {option.elsewhere for option in owners.values()} == {problem.why}


def test_a_value_that_breaks_a_rule_is_refused_in_a_request_and_in_python() -> None:
    for name, option in OWNED:
        if not option.rule:
            continue
        wrong = "x" if option.kind is str else -1
        assert option.breaks(wrong), option.key
        assert option.rule in {each.rule for each in problems(name, 4, 4, **{option.key: wrong})}
        words = [f"schedule={name}", f"schedule.{option.key}={wrong}", "parallelism.pipeline=4"]
        with pytest.raises(RequestError) as caught:
            checked(words, command="plan")
        assert option.rule in {each.rule for each in caught.value.problems if each.path == f"schedule.{option.key}"}


def test_false_is_as_good_as_not_given() -> None:
    words = ["schedule=gpipe", "schedule.opportunistic=false", "parallelism.pipeline=2"]
    assert checked(words, command="plan").schedule.given == {}


def test_a_key_that_no_schedule_has_is_no_argument() -> None:
    assert "wabe" not in OPTIONS
    with pytest.raises(TypeError, match="wabe"):
        build("1f1b", 2, 4, wabe=3)
    assert not any("wabe" in spec.keys for spec in SPECS.values())
