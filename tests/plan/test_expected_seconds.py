"""Between which seconds a plan expects a step, and which layouts are as fast as far as plans are certain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_core_notes import profile

from runner.plan.uncertainty import expected_seconds


def test_estimates_may_be_off_by_two_fifths() -> None:
    estimated = replace(profile(), seconds_source="estimated")
    found = expected_seconds(10.0, estimated, 0.1, actions=8, accelerated=True)
    assert found == pytest.approx((6.0, 14.0))


def test_independent_errors_add_up_as_squares() -> None:
    measured = replace(profile(), seconds_source="measured", spread=0.06, busy_share=0.08)
    low, high = expected_seconds(11.0, measured, 0.0, actions=8, accelerated=True)
    assert (low, high) == pytest.approx((10.0, 12.1))


def test_a_cpu_may_take_longer_for_each_action() -> None:
    measured = replace(profile(), seconds_source="measured", spread=0.0, busy_share=0.0)
    low, high = expected_seconds(1.1, measured, 0.1, actions=20, accelerated=False)
    assert (low, high) == pytest.approx((1.0, 1.21 + 20 * 5e-3))
