"""Checkmate's programs of parts of a stage: how many are solved, and what the stages that are put together cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from plan_profiles import layer, model
from test_monet import least_seconds, random_stage

from runner.memory.solve.graph import checkmate as solver
from runner.memory.solve.graph.parts import Part, orders_of_parts
from runner.memory.solve.graph.stage import graph_of
from runner.memory.solve.graph.values import Order, kept_bytes, replayed
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.strategies import checkmate as strategy
from runner.memory.solve.values import GraphProgram, StageChain
from runner.profile import BoundaryTensor, LayerProfile

BUDGETS = 20  # of a part, with one micro-batch in flight and with four


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The programs that are solved, by the number of their values and their budget; nothing is known before."""
    found: list[tuple[int, int]] = []
    cheapest = solver.cheapest_order

    def noted(graph: Any, budget: int, **limits: Any) -> Order | None:
        found.append((len(graph.values), budget))
        return cheapest(graph, budget, **limits)

    monkeypatch.setattr(solver, "cheapest_order", noted)
    for each in (strategy._order, strategy._orders_of_part):
        each.cache_clear()
    yield found
    for each in (strategy._order, strategy._orders_of_part):
        each.cache_clear()


def alike(count: int) -> tuple[LayerProfile, ...]:
    """Layers that are alike, each with a tensor of its own for the next one."""
    row = layer(saved_bytes=60, output_bytes=10, unsaved_forward_bytes=30, forward_seconds=1.0, backward_seconds=2.0)
    return tuple(
        replace(row, name=str(at), output=(BoundaryTensor(at, 10, 10),), saves=(at - 1, at), reads=(at - 1,))
        for at in range(count)
    )


def programs(chain: StageChain) -> list[GraphProgram]:
    made = STRATEGIES["checkmate"].candidates
    assert made is not None
    return [each.program for each in made(chain) if isinstance(each.program, GraphProgram)]


def test_alike_layers_are_solved_once_however_many_stages_and_limits_there_are(solved: list[tuple[int, int]]) -> None:
    profile = model(alike(97))
    inside = StageChain(profile, 12, 23, in_flight=5)
    assert len(programs(inside)) > 10
    once = len(solved)
    assert once <= 2 * 2 * BUDGETS  # a part that others follow, and the last part of a stage
    for first in range(24, 84, 12):
        for in_flight in (1, 4):
            again = StageChain(profile, first, first + 11, in_flight=in_flight, budget_bytes=1000 // in_flight)
            assert programs(again)
    assert len(programs(StageChain(profile, 12, 83))) > 10  # 72 layers
    assert len(solved) == once


def test_a_stage_of_one_part_is_solved_as_a_whole(solved: list[tuple[int, int]]) -> None:
    chain = StageChain(model(alike(4)), 0, 2)
    graph = graph_of(chain).graph
    assert programs(chain)
    assert {values for values, _ in solved} == {len(graph.values)}
    assert len(solved) < BUDGETS


def orders_by(chain: StageChain, layers: int, in_flight: int = 1) -> list[Order]:
    """Orders of a stage from parts of so many layers."""
    firsts = range(chain.first, chain.last + 1, layers)
    alone = [replace(chain, first=first, last=min(first + layers - 1, chain.last)) for first in firsts]
    graphs = [graph_of(each, followed=each.last < chain.last) for each in alone]
    parts = [Part(graph, strategy._orders_of_part(graph.graph, 2000)) for graph in graphs]
    return list(orders_of_parts(graph_of(chain), parts, in_flight, BUDGETS))


@pytest.mark.parametrize("seed", [0, 2])
def test_what_parts_save_is_near_the_least_of_all_ways(seed: int) -> None:
    """Brute force over all that may be kept and computed: no order beats it; the loss is that of the option file."""
    chain = random_stage(seed, 4, 0)
    graph = graph_of(chain).graph
    costs = [replayed(graph, order) for order in orders_by(chain, 2)]
    assert costs[0].seconds == replayed(graph, graph.once).seconds
    for cost in costs[1:4]:
        least = least_seconds(graph, cost.peak_bytes)
        assert least <= cost.seconds <= 1.09 * least


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_faster_order_takes_more_memory(in_flight: int) -> None:
    draw = random.Random(3)
    rows = [replace(each, saved_bytes=draw.randint(30, 90)) for each in alike(12)]
    chain = StageChain(model(rows), 0, 10)
    graph = graph_of(chain).graph
    found = [replayed(graph, order) for order in orders_by(chain, 3, in_flight)]
    kept = [kept_bytes(graph, order) for order in orders_by(chain, 3, in_flight)]
    memory = [cost.peak_bytes + (in_flight - 1) * each for cost, each in zip(found, kept, strict=True)]
    assert len(found) > 8
    assert [cost.seconds for cost in found] == sorted(cost.seconds for cost in found)
    assert memory == sorted(memory, reverse=True)
    assert memory[-1] < memory[0] / 2
