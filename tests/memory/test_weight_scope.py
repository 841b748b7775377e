"""Strategies of activations that choose among weights: the same bits, and peaks within the limit."""

from __future__ import annotations

import pytest
from test_weight_swap import SCALARS, planned, run

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.residency import WeightUnit
from runner.memory.solve.weight_sets import first_of_orders, taken_bytes
from runner.memory.solve.weight_strategy import StageUnits

WIDE = ("model.kwargs.width=256", "model.kwargs.layers=8")
CHOOSING = [name for name, offload in OFFLOADS.items() if offload.choose_weights is not None]


@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CHOOSING)
def test_bits_are_the_same_and_the_limit_is_kept(name: str, pipeline: int) -> None:
    layout = (*WIDE, f"parallelism.pipeline={pipeline}")
    kept = run("mlp", *layout)
    limit = int(0.7 * max(kept.plan.peak_memory_bytes))
    chosen = run("mlp", *layout, f"offload=activations_{name}", "offload.scope=weights", f"memory_limit={limit}")
    chosen.assert_same(kept)
    assert chosen.moved == chosen.planned
    assert all(sum(each) > 0 for each in chosen.moved)
    for measured, predicted in zip(chosen.peak, chosen.plan.peak_memory_bytes, strict=True):
        assert measured <= min(limit, predicted) + SCALARS


@pytest.mark.parametrize("name", CHOOSING)
def test_nothing_moves_if_everything_fits(name: str) -> None:
    plan = planned("mlp", *WIDE, f"offload=activations_{name}", "offload.scope=weights")
    assert plan.host_weight_bytes == (0, 0)


def test_the_first_of_an_order_move_as_few_as_are_needed_and_the_best_order_is_taken() -> None:
    units = [WeightUnit(at, at, size, size, 2 * size) for at, size in enumerate((5, 1, 3, 2, 4, 1))]
    orders = [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0)]
    for excess in range(1, 30):
        ways = []
        for order in orders:
            prefixes = ([units[at] for at in sorted(order[:count])] for count in range(1, len(order) + 1))
            fitting = (each for each in prefixes if sum(unit.home_bytes for unit in each) - taken_bytes(each) >= excess)
            ways.append(next(fitting, units))
        moved = [sum(unit.device_bytes for unit in way) for way in ways]
        assert first_of_orders(units, excess, orders) == ways[moved.index(min(moved))]
    assert first_of_orders(units, 0, orders) == []


def test_scores_prefer_weights_that_are_away_for_long() -> None:
    """Equal weights, of which the first is not used for the longest time."""
    units = [WeightUnit(at, at, 8, 8, 16) for at in range(5)]
    stage = StageUnits(units, 20, forward=[1.0] * 5, backward=[2.0] * 5, copying=[0.1] * 5)
    choose = OFFLOADS["autoswap"].choose_weights
    assert choose is not None
    assert next(iter(choose(stage))) == units[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("offload=activations_greedy", "offload.scope=all"), "offload.scope = all: must be activations or weights."),
        (
            ("offload=activations_vdnn_all", "offload.scope=weights"),
            "offload.scope = weights: must be activations with offload.activations=vdnn_all.",
        ),
        (("offload.scope=weights",), "offload.scope = weights: belongs to offload.activations="),
        (("offload=activations_dp", "offload.scope=weight"), "offload.scope = weight: must be one of activations, "),
    ],
)
def test_what_cannot_be_chosen_among_is_refused(words: tuple[str, ...], line: str) -> None:
    (problem,) = rules(resolve(["model=mlp", *words]))
    assert problem.line().startswith(line)
    assert not rules(resolve(["model=mlp", *words, *([problem.fix] if "=" in problem.fix else [])]))
