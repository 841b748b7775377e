"""The recipe that times planners: fitted powers, and chains for which every strategy plans."""

from __future__ import annotations

import math

import pytest

from runner.memory.solve.strategies import STRATEGIES
from runner.recipes.rematerialization.planners import PLANNERS, chain_of, exponent, planning_seconds


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_the_fitted_power_is_that_of_the_times(power: float) -> None:
    sizes = [10, 20, 40]
    assert math.isclose(exponent(sizes, [0.1 * size**power for size in sizes]), power)


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_plans(name: str) -> None:
    planner = PLANNERS[name]
    assert planner.strategy in STRATEGIES
    planning_seconds(planner, 8, planner.sizes[0] if planner.sizes else None)


def test_layers_of_the_chain_differ() -> None:
    assert len({row.saved_bytes for row in chain_of(8).layers}) > 4
