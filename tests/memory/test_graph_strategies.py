"""Strategies on graphs: beside all schedules of tiny graphs, and beside each other on random ones."""

from __future__ import annotations

import random
from itertools import product
from math import isqrt
from typing import Any

import pytest

from runner.memory.solve.graph import checkmate
from runner.memory.solve.graph.checkmate import cheapest_order, order_of_kept
from runner.memory.solve.graph.evicting import SCORES, evicting_order
from runner.memory.solve.graph.lower_sets import least_recomputation, lower_sets, order_of, prefix_closures
from runner.memory.solve.graph.values import Cost, Graph, Order, Value, replayed, training_graph


def chain(count: int, size: int = 1) -> list[Value]:
    return [Value(1.0, size, (index - 1,) if index else ()) for index in range(count)]


def random_forward(seed: int, count: int) -> list[Value]:
    """A chain with residual connections, and random seconds and bytes."""
    draw = random.Random(seed)
    values = []
    for index in range(count):
        skips = {draw.randrange(index)} if index > 1 and draw.random() < 0.5 else set()
        needs = {index - 1, *skips} if index else set()
        values.append(Value(float(draw.randint(1, 5)), draw.randint(1, 6), tuple(sorted(needs))))
    return values


def played(graph: Graph, order: Order) -> Cost:
    """The cost of an order by another way: at each position, everything whose next event is a use is there."""
    peak = 0
    for position in range(len(order)):
        held = set()
        for each in set(order[: position + 1]):
            ahead = [
                at for at in range(position, len(order)) if order[at] == each or each in needs_at(graph, order, at)
            ]
            is_used = any(each in needs_at(graph, order, at) for at in ahead[:1]) or order[position] == each
            later = [at for at in ahead if at > position]
            next_is_use = bool(later) and each in needs_at(graph, order, later[0])
            if is_used or next_is_use or each in needs_at(graph, order, position):
                held.add(each)
        peak = max(peak, sum(graph.values[each].num_bytes for each in held))
    return Cost(sum(graph.values[index].seconds for index in order), peak)


def needs_at(graph: Graph, order: Order, position: int) -> tuple[int, ...]:
    return graph.values[order[position]].needs


def test_the_cost_of_an_order() -> None:
    graph = training_graph(chain(3, size=2))
    assert [value.needs for value in graph.values] == [(), (0,), (1,), (1, 2), (0, 1, 3), (0, 4)]
    assert replayed(graph, graph.once) == Cost(9.0, 8)  # three values and the first gradient
    assert replayed(graph, (0, 1, 2, 3, 4, 0, 5)) == Cost(10.0, 8)
    with pytest.raises(ValueError, match="value 2 needs 1, which is not there"):
        replayed(graph, (0, 2, 1, 3, 4, 5))
    with pytest.raises(ValueError, match=r"values \[5\] are never computed"):
        replayed(graph, (0, 1, 2, 3, 4))


@pytest.mark.parametrize("seed", range(6))
def test_costs_are_those_of_another_count(seed: int) -> None:
    graph = training_graph(random_forward(seed, 5))
    orders = [graph.once, evicting_order(graph, replayed(graph, graph.once).peak_bytes * 3 // 4)]
    for order in orders:
        if order is not None:
            assert replayed(graph, order) == played(graph, order)


def all_costs(graph: Graph) -> list[Cost]:
    """The costs of every choice of what is kept between stages."""
    places = [(stage, index) for stage in range(len(graph.values)) for index in range(stage)]
    costs = []
    for bits in product((False, True), repeat=len(places)):
        chosen = dict(zip(places, bits, strict=True))
        order = order_of_kept(graph, lambda stage, index, chosen=chosen: chosen[stage, index])  # type: ignore[misc]
        try:
            costs.append(replayed(graph, order))
        except ValueError:
            continue  # something is kept that was not there
    return costs


@pytest.mark.parametrize("seed", range(3))
def test_checkmate_is_the_cheapest_of_all_that_may_be_kept(seed: int) -> None:
    graph = Graph(tuple(random_forward(seed, 5)))
    costs = all_costs(graph)
    for budget in {cost.peak_bytes for cost in costs}:
        expected = min(cost.seconds for cost in costs if cost.peak_bytes <= budget)
        order = cheapest_order(graph, budget)
        assert order is not None
        assert replayed(graph, order).seconds == expected
    assert cheapest_order(graph, min(cost.peak_bytes for cost in costs) - 1) is None


def stashed(graph: Graph, order: Order, count: int) -> int:
    """The bytes of forward values that are used after the first forward, before they are computed again."""
    start = order.index(count - 1) + 1
    again: set[int] = set()
    found: set[int] = set()
    for position in range(start, len(order)):
        found |= set(needs_at(graph, order, position)) - again
        again.add(order[position])
    return sum(graph.values[each].num_bytes for each in found if each < count)


@pytest.mark.parametrize("seed", range(4))
def test_others_in_flight_take_memory(seed: int) -> None:
    count, in_flight = 5, 3
    plain = training_graph(random_forward(seed, count))
    graph = Graph(plain.values, ends=tuple(range(count - 1, 2 * count)))
    alone = replayed(graph, graph.once).peak_bytes
    most = alone + (in_flight - 1) * stashed(graph, graph.once, count)
    costs = []
    for part in range(10, 3, -1):
        budget = most * part // 10
        order = cheapest_order(graph, budget, in_flight=in_flight)
        if order is not None:
            assert replayed(graph, order).peak_bytes + (in_flight - 1) * stashed(graph, order, count) <= budget
        costs.append(replayed(graph, order).seconds if order is not None else float("inf"))
    assert costs == sorted(costs)
    assert costs[0] == replayed(graph, graph.once).seconds < costs[-1]


def test_what_a_run_makes_again_takes_the_place_of_what_is_there() -> None:
    run, output, saved = Value(1.0, 0, is_run=True), Value(0.0, 4, (0,)), Value(0.0, 6, (0,))
    graph = Graph((run, output, saved, Value(2.0, 4, (1,)), Value(2.0, 4, (1, 2, 3))), (2, 3, 4), {1: 3, 2: 4})
    order = order_of_kept(graph, lambda stage, index: index == 1)
    assert order == (0, 1, 2, 3, 0, 1, 2, 4)
    unused = Graph((*graph.values[:4], Value(2.0, 4, (2, 3))), graph.ends, graph.backward)
    assert order_of_kept(unused, lambda stage, index: index == 1) == (0, 1, 2, 3, 0, 2, 4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each program that is solved, whether its numbers are whole."""
    found: list[bool] = []
    solved = checkmate._Model.solved

    def noted(self: checkmate._Model, *, whole_numbers: bool, **limits: Any) -> object:
        found.append(whole_numbers)
        return solved(self, whole_numbers=whole_numbers, **limits)

    monkeypatch.setattr(checkmate._Model, "solved", noted)
    return found


def test_what_the_relaxed_program_proves_is_not_solved_again(asked: list[bool]) -> None:
    forward = chain(32)
    graph = training_graph(forward)
    plain = replayed(graph, graph.once)
    budget = plain.peak_bytes * 3 // 4
    known = least_recomputation(graph, 32, prefix_closures(forward), budget)
    assert known is not None
    order = cheapest_order(graph, budget, gap=0.01, known=[known])
    assert order is not None
    assert asked == [False]
    assert replayed(graph, order).peak_bytes <= budget
    # Nine layers of 32 are run again: 24 values of a layer's bytes are all that fit, beside the gradient that runs.
    assert replayed(graph, order).seconds == plain.seconds + 9


def test_an_order_that_is_rounded_may_be_enough(asked: list[bool]) -> None:
    graph = training_graph(random_forward(1, 6))
    order = cheapest_order(graph, replayed(graph, graph.once).peak_bytes, gap=0.0)
    assert order == graph.once
    assert asked == [False]


def test_the_bound_is_raised_to_whole_layers(asked: list[bool]) -> None:
    forward = chain(12, size=5)
    graph = training_graph(forward)
    known = least_recomputation(graph, 12, prefix_closures(forward), 48)
    assert known is not None
    assert cheapest_order(graph, 48, known=[known]) is not None
    assert asked == [False]  # which gives 39.4, between three and four layers that run again
    assert replayed(graph, known).seconds == 40


def test_a_known_order_is_the_result_where_the_solver_is_stopped(asked: list[bool]) -> None:
    graph = training_graph(random_forward(9, 6))
    budget = replayed(graph, graph.once).peak_bytes * 4 // 5
    best = cheapest_order(graph, budget)
    assert best is not None
    asked.clear()
    stopped = cheapest_order(graph, budget, nodes=0, known=[best])
    assert stopped is not None
    assert asked == [False, True]
    assert replayed(graph, stopped) == replayed(graph, best)
    assert cheapest_order(graph, budget, seconds=0.0, known=[best]) == best
    assert cheapest_order(graph, budget, seconds=0.0, known=[graph.once]) is None  # it does not fit


def budgets(graph: Graph) -> list[int]:
    most = replayed(graph, graph.once).peak_bytes
    return [most, most * 4 // 5, most * 3 // 5]


def compare(seed: int, count: int) -> None:
    """The strategies on one graph, within several budgets."""
    forward = random_forward(seed, count)
    graph = training_graph(forward)
    for budget in budgets(graph):
        best = cheapest_order(graph, budget)
        sets = lower_sets(forward), prefix_closures(forward)
        exact, approximate = (least_recomputation(graph, count, each, budget) for each in sets)
        others = [evicting_order(graph, budget, score=score) for score in SCORES]
        for order in (exact, approximate, *others):
            if order is not None:
                assert best is not None
                assert replayed(graph, order).peak_bytes <= budget
                assert replayed(graph, best).seconds <= replayed(graph, order).seconds
        if approximate is not None:
            assert exact is not None
            assert replayed(graph, exact).seconds <= replayed(graph, approximate).seconds
        if best is not None:
            assert replayed(graph, best).peak_bytes <= budget


def test_none_is_cheaper_than_checkmate_nor_the_approximation_than_all_lower_sets() -> None:
    for seed in range(3):
        compare(seed, 5)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_none_is_cheaper_than_checkmate_on_twenty_graphs() -> None:
    for seed in range(20):
        compare(seed, 6 + seed % 3)


def test_with_enough_memory_nothing_is_computed_again() -> None:
    forward = random_forward(1, 6)
    graph = training_graph(forward)
    budget = 10 * replayed(graph, graph.once).peak_bytes
    for order in (
        least_recomputation(graph, 6, lower_sets(forward), budget),
        least_recomputation(graph, 6, prefix_closures(forward), budget),
        *(evicting_order(graph, budget, score=score) for score in SCORES),
    ):
        assert order is not None
        assert len(order) == len(graph.values)


def test_lower_sets_of_a_chain_are_its_beginnings() -> None:
    assert lower_sets(chain(7)) == prefix_closures(chain(7)) == [2**count - 1 for count in range(1, 8)]
    wide = [Value(1.0, 1)] * 20
    with pytest.raises(ValueError, match="more than 1000 lower sets"):
        lower_sets(wide)


def test_two_parts_of_a_chain_are_run_as_chen_runs_them() -> None:
    graph = training_graph(chain(4))
    assert order_of(graph, 4, [0b0011, 0b1111]) == (0, 1, 2, 3, 4, 5, 0, 6, 7)


@pytest.mark.parametrize("score", ["full", "local"])
def test_a_chain_in_the_square_root_of_its_memory_takes_a_multiple_of_its_computations(score: str) -> None:
    """Kirisame et al. 2021: N layers, memory of the order of the square root of N, computations of the order of N."""
    for count in (36, 100, 196):
        graph = training_graph(chain(count))
        order = evicting_order(graph, 3 * isqrt(count), score=score)
        assert order is not None
        assert replayed(graph, order).peak_bytes <= 3 * isqrt(count)
        assert len(order) <= 2 * len(graph.values)


def test_no_room_is_no_order() -> None:
    graph = training_graph(chain(4))
    assert evicting_order(graph, 2) is None
    assert cheapest_order(graph, 2) is None
    assert least_recomputation(graph, 4, lower_sets(chain(4)), 2) is None
