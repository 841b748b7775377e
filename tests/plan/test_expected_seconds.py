"""Between which seconds a plan expects a step, and which layouts are as fast as far as plans are certain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_core_notes import profile
from test_make import planned

from runner.plan.render_sweep import SweepRow, sweep_text
from runner.plan.uncertainty import expected_seconds


def test_estimates_may_be_off_by_two_fifths() -> None:
    estimated = replace(profile(), seconds_source="estimated")
    found = expected_seconds(10.0, estimated, 0.1, actions=8, accelerated=True)
    assert found == pytest.approx((6.0, 14.0))


def test_independent_errors_add_up_as_squares() -> None:
    measured = replace(profile(), seconds_source="measured", spread=0.06, busy_share=0.08)
    low, high = expected_seconds(11.0, measured, 0.0, actions=8, accelerated=True)
    assert (low, high) == pytest.approx((10.0, 12.1 + 5e-3))


def test_a_cpu_may_take_longer_for_each_action_and_the_loop() -> None:
    measured = replace(profile(), seconds_source="measured", spread=0.0, busy_share=0.0)
    low, high = expected_seconds(1.1, measured, 0.1, actions=20, accelerated=False)
    assert (low, high) == pytest.approx((1.0, 1.21 + (20 + 1) * 5e-3))


def test_a_table_of_plans_names_steps_that_were_disturbed() -> None:
    quiet = planned()
    disturbed = replace(quiet, profile=replace(quiet.profile, busy_share=0.5))
    rows = [SweepRow(["a=1", "b=2"], quiet), SweepRow(["a=1", "b=3"], disturbed)]
    shown = sweep_text(rows, 120).splitlines()[-1]
    assert shown.startswith("b=3: other work took 50% of a core while its layers were measured")
    assert "other work" not in sweep_text([rows[0]], 120)
