"""Strategies of activations that choose among weights: the same bits, and peaks within the limit."""

from __future__ import annotations

import pytest
from swapped_runs import STEPS
from test_weight_swap import SCALARS, planned, run

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.residency import WeightUnit
from runner.memory.solve.weight_sets import first_of_orders, taken_bytes
from runner.memory.solve.weight_strategy import StageUnits
from runner.plan.values import RunPlan
from runner.schedule.simulation.host_link import HostLink, Lanes, StageMoves
from runner.schedule.simulation.weight_link import WeightLink, WeightRun, WeightTurn

WIDE = ("model.kwargs.width=64", "model.kwargs.layers=8")


WIDER = ("model.kwargs.width=64",)
ALL = ("offload.scope=all",)


@pytest.mark.parametrize(
    ("model", "name", "layout"),
    [
        ("mlp", "autoswap", ("activation_checkpoint=full",)),
        ("convolutions", "tflms", ("parallelism.pipeline=2", "schedule=looped_bfs")),
    ],
)
def test_activations_and_weights_move_together(model: str, name: str, layout: tuple[str, ...]) -> None:
    """Bits, bytes moved, and peaks, at a limit that activations alone do not keep."""
    kept = run(model, *layout)
    limit = int(0.4 * max(kept.plan.peak_memory_bytes))
    both = run(model, *layout, f"offload=activations_{name}", *ALL, f"memory_limit={limit}")
    both.assert_same(kept)
    assert both.moved == both.planned
    assert both.activations == STEPS * 2 * both.plan.host_activation_bytes
    assert both.activations + sum(map(sum, both.moved)) > 0
    for measured, predicted in zip(both.peak, both.plan.peak_memory_bytes, strict=True):
        assert measured <= predicted + SCALARS


@pytest.mark.costly
def test_weights_move_where_activations_do_not_suffice_and_nothing_moves_in_vain() -> None:
    sizes, moved = ("model.kwargs.width=64",), []
    kept = planned("gpt", *sizes)

    def plan(scope: str, share: float) -> RunPlan:
        limit = f"memory_limit={int(share * kept.peak_memory_bytes[0])}"
        return planned("gpt", *sizes, "offload=activations_autoswap", f"offload.scope={scope}", limit)

    for share in (1.01, 0.9, 0.8, 0.6, 0.4):
        activations, weights, both = (plan(scope, share) for scope in ("activations", "weights", "all"))
        assert both.fits
        if activations.fits:
            assert both.activations == activations.activations
            assert not both.turns
        elif weights.fits:
            assert _bytes(both) <= _bytes(weights)
        moved.append((activations.fits, _bytes(both) > 0, sum(both.host_weight_bytes) > 0))
    assert moved[0] == (True, False, False)
    assert (True, True, False) in moved
    assert moved[-1] == (False, True, True)


def _bytes(plan: RunPlan) -> float:
    return 2 * plan.host_activation_bytes + sum(plan.host_weight_bytes)


def test_weights_move_alone_where_fewer_bytes_move_so() -> None:
    """Where a little too much is there, one layer's weights are fewer bytes than all activations."""
    kept = planned("gpt", *WIDER)
    least = planned("gpt", *WIDER, "offload=activations_async").peak_memory_bytes[0]
    words = ("offload=activations_greedy", f"memory_limit={least - 1}")
    both, weights = (planned("gpt", *WIDER, *words, f"offload.scope={scope}") for scope in ("all", "weights"))
    assert least < kept.peak_memory_bytes[0]
    assert (_bytes(both), both.activations) == (_bytes(weights), weights.activations)
    assert both.fits


def test_activations_move_alone_where_no_weight_can() -> None:
    frozen_only = ("offload=activations_greedy", *ALL, "offload.frozen_only=true", "model.kwargs.width=64")
    plan = planned("gpt", *frozen_only, "memory_limit=1GB")
    assert plan.fits
    assert not plan.turns


def test_what_a_last_layer_makes_of_an_output_that_stays_is_there_beside_what_still_leaves() -> None:
    """A stage whose last operator saves its output makes a gradient before it asks for anything that has moved."""
    layout = ("parallelism.pipeline=2", "schedule=looped_bfs", "partition=manual", "partition.boundaries=[1,2,4]")
    moved = run("convolutions", *layout, "offload=activations_async")
    for measured, predicted in zip(moved.peak, moved.plan.peak_memory_bytes, strict=True):
        assert 0.99 * predicted <= measured <= predicted + SCALARS


def test_activations_and_weights_wait_for_each_other_on_one_link() -> None:
    """Two layers, of which the second's weights come while the first's activations go, and both come back."""
    lanes = Lanes()
    moves = StageMoves((0.5, 0.5), (0.5, 0.5), (8, 0), (3.0, 0.0))
    first = WeightRun((WeightTurn(0.5, None, (), (), (0,)), WeightTurn(0.5, 0, ((0, 2.0),), (), (1,))))
    second = WeightRun(
        (WeightTurn(0.5, 0, ((0, 2.0),), (), (1,)), WeightTurn(0.5, None, (), (1.0,), (0,))), is_last=True
    )
    host = HostLink([moves], lanes)
    weights = WeightLink({(False, 0, 0): first, (True, 0, 0): second}, lanes)
    # Activations leave from 1 to 4; weights are asked for at 1 and there at 3, where the second layer begins.
    assert host.forward((0, 0), moves, 0.0, 0.0, 2.0, weights.turns((False, 0, 0))) == 4.0
    # From 4 to 7 activations come back, and only then weights, to 9: the second layer runs to 10. Its gradients leave
    # from 10 to 11 while the first layer runs.
    end = host.backward((0, 0), moves, 4.0, 4.0, 2.0, weights.turns((True, 0, 0)), all_at_once=False)
    assert end == 11.0
    assert host.waited == 2.0 + 5.0


def test_nothing_moves_if_everything_fits() -> None:
    plan = planned("mlp", *WIDE, "offload=activations_greedy", "offload.scope=weights")
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
        (("offload=weights_granular", "offload.scope=all"), "offload.scope = all: belongs to offload.activations="),
        (
            ("offload=activations_greedy", "offload.weights=granular", "offload.scope=all"),
            "offload.weights = granular: must be none, or greedy, with offload.scope=all.",
        ),
        (
            ("offload=activations_greedy", "offload.weights=granular"),
            "offload.weights = granular: must be none with offload.activations=greedy.",
        ),
        (
            ("offload=activations_vdnn_all", "offload.scope=all"),
            "offload.scope = all: must be activations with offload.activations=vdnn_all.",
        ),
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
