"""Of a schedule's many defects a user sees the first ones and their number; a program gets all of them."""

from __future__ import annotations

from runner.errors import Problem, RequestError


def test_of_one_value_the_first_eight_are_told() -> None:
    many = [Problem("schedule.file", "my.csv", f"defect {number}") for number in range(20)]
    error = RequestError([*many, Problem("seed", -1, "must not be negative")])
    lines = str(error).splitlines()
    assert lines[:8] == [f"schedule.file = my.csv: defect {number}." for number in range(8)]
    assert lines[8:] == ["schedule.file = my.csv: and 12 more problems.", "seed = -1: must not be negative."]
    assert len(error.problems) == 21


def test_nine_are_eight_and_one_more() -> None:
    error = RequestError([Problem("a", 1, f"defect {number}") for number in range(9)])
    assert str(error).splitlines()[8:] == ["a = 1: and 1 more problem."]
