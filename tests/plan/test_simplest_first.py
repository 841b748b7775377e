"""Which of the layouts that predictions do not tell apart ``parallelism=auto`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.plan.planners.choose import FASTEST, Choice, simplest_first
from runner.plan.values import RunPlan


def choice(name: str, seconds: float, ranks: int, *, fits: bool = True) -> Choice:
    answer = SimpleNamespace(
        world_size=ranks, moved=(), states_in_host=False, stages=((0, 1),), order=None, kept=("none",), zero=None
    )
    return Choice(cast(Any, answer), {"name": name}, plan(seconds, fits=fits), name)


def plan(seconds: float, *, fits: bool = True) -> RunPlan:
    return cast(RunPlan, SimpleNamespace(time=SimpleNamespace(step_seconds=seconds), fits=fits))


@pytest.mark.parametrize(
    ("seconds", "fits", "typed", "taken"),
    [
        (1.01, True, 1.01, "half"),
        (1.03, True, 1.03, "whole"),
        (1.01, False, 1.01, "whole"),
        (1.01, True, 1.03, "whole"),  # planned as it would be typed it is longer
    ],
)
def test_the_simpler_one_is_taken_where_it_is_as_fast_and_fits(
    seconds: float, fits: bool, typed: float, taken: str
) -> None:
    def confirm(keys: Mapping[str, Any]) -> RunPlan:
        assert keys["name"] == "half"
        return plan(typed)

    given = [choice("whole", 1.0, 4), choice("half", seconds, 2, fits=fits), choice("slow", 2.0, 1)]
    found = simplest_first(given, confirm, lambda each: each.seconds)
    assert found[0].keys["name"] == taken
    assert sorted(each.keys["name"] for each in found) == ["half", "slow", "whole"]
    assert [each.told for each in found].count(FASTEST) == (taken == "half")
