"""Coop: the cheapest window of an arena, an arena that is never exceeded, and runs with the same bits."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from test_budgets import SCALARS
from test_evicting import ran as ran_with
from test_graph_programs import Bench, bench, plain

from runner.memory.apply import arena_pool
from runner.memory.solve.arena import Arena, ArenaProgram
from runner.memory.solve.graph.evicting import Forward, evicting_order
from runner.memory.solve.graph.stage import StageGraph, graph_of
from runner.memory.solve.graph.values import Order, replayed
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import StageChain
from runner.plan.choices import program_cost


def filled(draw: random.Random, num_bytes: int) -> tuple[Arena[int], dict[int, tuple[int, int]]]:
    """An arena after items came and went, and the places that they must have by counting bytes one by one."""
    arena, cells = Arena[int](num_bytes), [-1] * num_bytes
    for item in range(14):
        size, from_end = draw.randint(1, 6), draw.random() < 0.3
        starts = [at for at in range(num_bytes - size + 1) if set(cells[at : at + size]) == {-1}]
        assert arena.place(item, size, from_end=from_end) == bool(starts)
        if starts:
            start = max(starts) if from_end else min(starts)
            cells[start : start + size] = [item] * size
        there = sorted(set(cells) - {-1})
        if there and draw.random() < 0.4:
            gone = draw.choice(there)
            arena.remove(gone)
            cells = [-1 if each == gone else each for each in cells]
    return arena, {each: (cells.index(each), cells.count(each)) for each in set(cells) - {-1}}


@pytest.mark.parametrize("seed", range(20))
def test_the_window_is_the_cheapest_of_all(seed: int) -> None:
    """By trying every stretch of bytes."""
    draw = random.Random(seed)
    num_bytes = 24
    arena, places = filled(draw, num_bytes)
    assert arena.held_bytes == sum(size for _, size in places.values())
    costs = {item: None if draw.random() < 0.2 else float(draw.randint(0, 9)) for item in places}
    for wanted in range(1, num_bytes + 1):
        totals = []
        for start in range(num_bytes - wanted + 1):
            met = [item for item, (at, size) in places.items() if at < start + wanted and start < at + size]
            if all(costs[item] is not None for item in met):
                totals.append(sum(costs[item] or 0.0 for item in met))
        found = arena.window(wanted, costs.get)
        assert (found is None) == (not totals)
        if found is not None:
            assert sum(costs[item] or 0.0 for item in found) == min(totals)
            after = Arena[int](num_bytes)
            after._places = {item: place for item, place in arena._places.items() if item not in found}
            assert after.place(99, wanted)


def test_fragmentation_is_what_the_largest_gap_lacks_of_the_free_bytes() -> None:
    arena = Arena[str](10)
    assert arena.fragmentation == 0
    for item in "abcde":
        arena.place(item, 2)
    arena.remove("b")
    arena.remove("d")
    assert arena.fragmentation == 0.5
    assert not arena.place("f", 3)
    assert arena.window(3, {"a": 1.0, "c": 3.0, "e": 2.0}.get) == ["a"]


class _Watched(Arena[int]):
    """Notes the fragmentation whenever there is no gap, and the sizes that it had at most."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.size, self.without_gap = num_bytes, list[float]()

    def place(self, item: int, num_bytes: int, *, from_end: bool = False) -> bool:
        found = super().place(item, num_bytes, from_end=from_end)
        spans = sorted(place for place in self._places.values() if place[0] < place[1])
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
        assert not spans or spans[-1][1] <= self.size
        if not found:
            self.without_gap.append(self.fragmentation)
        return found


@cache
def timed_chain(name: str) -> StageChain:
    """A model whose layers take a second for each byte that they write, and for sixteen FLOPs."""
    chain = bench(name).chain
    rows = (
        replace(row, forward_seconds=row.forward_flops / 16 + row.saved_bytes, backward_seconds=row.backward_flops / 16)
        for row in chain.profile.layers
    )
    return replace(chain, profile=replace(chain.profile, layers=tuple(rows)))


def timed(name: str) -> StageGraph:
    """The graph of such a model."""
    return graph_of(timed_chain(name))


def in_arena(made: StageGraph, budget: int, *, side_by_side: bool) -> tuple[Order | None, _Watched]:
    arena = _Watched(budget)
    forward = Forward(made.num_forward, budget)
    order = evicting_order(made.graph, budget, forward=forward, patience=8, arena=arena, side_by_side=side_by_side)
    return order, arena


def test_dtr_needs_more_seconds_in_the_same_arena_and_leaves_smaller_gaps() -> None:
    """Seconds in all parts of the plain peak in which both find a way, and the fragmentation when there is no gap."""
    made = timed("U-Net")
    most = replayed(made.graph, made.graph.once).peak_bytes
    totals, gaps = [0.0, 0.0], [list[float](), list[float]()]
    for part in range(19, 5, -1):
        budget = most * part // 20
        found = [in_arena(made, budget, side_by_side=side_by_side) for side_by_side in (True, False)]
        for at, (order, arena) in enumerate(found):
            gaps[at] += arena.without_gap
            if order is not None:
                assert arena.peak_bytes <= budget
                assert replayed(made.graph, order).peak_bytes <= budget
        if all(order is not None for order, _ in found):
            for at, (order, _) in enumerate(found):
                totals[at] += replayed(made.graph, order or ()).seconds
    assert 0 < totals[0] < totals[1]
    in_windows, one_by_one = (sum(each) / len(each) for each in gaps)
    assert in_windows < one_by_one


def programs(of: Bench) -> list[ArenaProgram]:
    make = STRATEGIES["coop"].candidates
    assert make is not None
    found = make(StageChain(of.chain.profile, of.chain.first, of.chain.last))
    return [each.program for each in found if isinstance(each.program, ArenaProgram)]


def test_gradients_are_the_same_bits_and_the_arena_is_never_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[Arena[object]] = []

    class Noted(Arena[object]):
        def __init__(self, num_bytes: int) -> None:
            super().__init__(num_bytes)
            self.num_bytes = num_bytes
            arenas.append(self)

    monkeypatch.setattr(arena_pool, "Arena", Noted)
    of, expected = bench("skips"), plain("skips")
    found = programs(of)
    assert len(found) > 3
    for program in found[:: max(1, len(found) // 2)]:
        peak, result = ran_with(of, program)
        assert all(map(torch.equal, result, expected.result))
        assert peak <= program_cost(of.chain, program).peak_bytes + SCALARS
        arena = arenas.pop()
        assert 0 < arena.peak_bytes <= program.pool_bytes
        assert not arena.held_bytes  # nothing is left when the backward is over
