"""DTR: greedy decisions that keep the budget, programs with the same bits, and limits that are kept."""

from __future__ import annotations

import pytest
from test_coop import timed
from test_graph_programs import bench, programs_of, refused, runs_as_predicted

from runner.memory.solve.graph.checkmate import cheapest_order
from runner.memory.solve.graph.evicting import SCORES, Forward, evicting_order
from runner.memory.solve.graph.stage import StageGraph
from runner.memory.solve.graph.values import Order, replayed


def orders(made: StageGraph, score: str) -> list[tuple[int, Order]]:
    """Budgets and the orders within them, in falling parts of the plain peak."""
    most = replayed(made.graph, made.graph.once).peak_bytes
    found = []
    for part in range(20, 0, -1):
        budget = most * part // 20
        forward = Forward(made.num_forward, budget)
        order = evicting_order(made.graph, budget, score=score, forward=forward, patience=8)
        if order is not None:
            found.append((budget, order))
    return found


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["skips", "U-Net"])
def test_the_budget_is_kept_and_only_the_forward_runs_again(name: str, score: str) -> None:
    made = bench(name).graph
    found = orders(made, score)
    assert len(found) > 3
    for budget, order in found:
        assert replayed(made.graph, order).peak_bytes <= budget
        assert order[: made.num_forward] == made.graph.once[: made.num_forward]
        assert sorted(index for index in order if index >= made.num_forward) == list(
            range(made.num_forward, len(made.graph.values))
        )
    assert any(len(order) > len(made.graph.values) for _, order in found)


def test_what_a_forward_needs_later_is_not_evicted_before() -> None:
    made = bench("U-Net").graph
    for _, order in orders(made, "size"):
        assert len(set(order[: made.num_forward])) == made.num_forward


def test_checkmate_is_as_fast_at_least() -> None:
    made = timed("skips")
    budget, order = orders(made, "full")[6]
    best = cheapest_order(made.graph, budget, seconds=1e6, gap=0.05, nodes=20)
    assert best is not None
    assert 0 < replayed(made.graph, best).seconds <= 1.05 * replayed(made.graph, order).seconds


@pytest.mark.parametrize(("name", "score"), [("skips", "local"), ("U-Net", "lru")])
def test_programs_give_the_same_bits_with_the_predicted_peak(name: str, score: str) -> None:
    programs = programs_of("dtr", bench(name), score=score)
    assert programs
    for program in (programs[len(programs) // 2], programs[-1]):
        runs_as_predicted(name, program)


def test_a_score_that_knows_the_seconds_runs_less_again_than_the_time_since_the_last_use() -> None:
    """Kirisame et al. 2021 find the full score best; here the sums over all budgets that both keep."""
    made = timed("U-Net")
    totals = {}
    for score in ("full", "lru"):
        found = dict(orders(made, score))
        totals[score] = {budget: replayed(made.graph, order).seconds for budget, order in found.items()}
    both = totals["full"].keys() & totals["lru"].keys()
    assert 0 < sum(totals["full"][each] for each in both) < sum(totals["lru"][each] for each in both)


def test_an_unknown_score_is_refused() -> None:
    told = refused("activation_checkpoint=dtr", "activation_checkpoint.score=ful")
    assert told.startswith("activation_checkpoint.score = ful: must be one of full, local, lru, size.")
    assert "activation_checkpoint.score=full" in told
