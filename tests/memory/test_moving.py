"""The dynamic program of moves and second runs, beside all programs of small chains, played one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import pytest
from test_rotor import Chain, Part, Parts, schedules

from runner.memory.solve.planned_moves import with_neighbours
from runner.memory.solve.solvers.moving import Link, MovePlan
from runner.memory.solve.solvers.persistent import PersistentPlan
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import Segment

MEMORY = 120  # the most units of memory, of one byte each
SECONDS_OF_BYTE = 3


class Cost(NamedTuple):
    needs: int
    seconds: float


def played(chain: Chain, parts: Parts, moved: Sequence[bool], room: int, in_flight: int) -> Cost | None:
    """The memory and the seconds of one program. None if something cannot be moved."""
    kept, needs, running = 0, 0, 0.0
    out, back = 0.0, 0.0  # what the lanes still have to do; the backward is seen from its end
    place = "kept"  # where the input of the next layer is
    for part, goes in zip(parts, moved, strict=True):
        first = part.first
        own = chain.sizes[first] if place == "own" else 0
        there = own if place == "own" else chain.saved[first - 1] if place == "moved" else 0
        forward = sum(chain.forward[first : part.last + 1])
        if part.inside is None:
            ahead = chain.sizes[-1] + chain.more_forward[first]
            behind = chain.sizes[first + 1] + chain.more_backward[first]
            peak, backward = chain.saved[first] + max(ahead + own, behind + there), chain.backward[first]
            whole = chain.saved[first] + own
            stays = chain.sizes[-1] if first == chain.count - 1 else 0
            place = "moved" if goes else "kept"
        else:
            peak = max(without_graph(chain, part) + own, chain.peak(part.inside) + there)
            backward = chain.seconds(part.inside)
            whole, stays, place = own, 0, "own"
        needs = max(needs, in_flight * kept + room + peak)
        kept += stays if goes else whole
        needs = max(needs, in_flight * kept)
        size = whole - stays
        if goes and not 0 < size <= room:
            return None
        running += forward + backward
        out, back = max(0.0, out - forward), max(0.0, back - backward)
        if goes:
            full = SECONDS_OF_BYTE * room
            out, back = out + SECONDS_OF_BYTE * size, back + SECONDS_OF_BYTE * size
            running += max(0.0, out - full) + max(0.0, back - full)
            out, back = min(out, full), min(back, full)
    return Cost(needs, running + out + back)


def without_graph(chain: Chain, part: Part) -> int:
    layers = range(part.first, part.last + 1)
    inputs = (chain.sizes[at] if at > part.first else 0 for at in layers)
    return max(own + chain.sizes[at + 1] + chain.more_forward[at] for own, at in zip(inputs, layers, strict=True))


def every_cost(chain: Chain, room: int, in_flight: int, *, again: bool) -> Iterator[Cost]:
    keeping = tuple(Part(at, at) for at in range(chain.count))
    for parts in schedules(0, chain.count - 1, whole=False) if again else [keeping]:
        for moved in product((False, True), repeat=len(parts)):
            cost = played(chain, parts, moved, room, in_flight)
            if cost is not None:
                yield cost


def plan_of(chain: Chain, room: int, in_flight: int, *, again: bool) -> MovePlan:
    costs = chain.costs()
    second = PersistentPlan(costs, MEMORY, MEMORY) if again else None
    link = Link(lambda num_bytes: SECONDS_OF_BYTE * num_bytes, room, SECONDS_OF_BYTE * room)
    return MovePlan(costs, link, MEMORY, MEMORY, in_flight=in_flight, again=second)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_no_program_of_a_small_chain_is_faster_in_the_same_memory(seed: int, again: bool, in_flight: int) -> None:
    chain = Chain(seed, count=4 if again else 6)
    room = sorted(chain.saved)[-2]
    costs = list(every_cost(chain, room, in_flight, again=again))
    plan = plan_of(chain, room, in_flight, again=again)
    levels = set()
    for memory in range(MEMORY + 1):
        best = min((cost.seconds for cost in costs if cost.needs <= memory), default=float("inf"))
        assert plan.seconds(memory) == pytest.approx(best, rel=1e-6)
        levels.add(best)
    assert len(levels) >= 3


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_its_decisions_take_the_memory_and_the_seconds_that_it_says(seed: int, again: bool, in_flight: int) -> None:
    chain = Chain(seed, count=8)
    room = sorted(chain.saved)[-2]
    plan = plan_of(chain, room, in_flight, again=again)
    assert plan.levels
    for memory in plan.levels:
        decisions = list(plan.decisions(memory))
        assert [each.first for each in decisions] == [0, *(each.last + 1 for each in decisions[:-1])]
        assert decisions[-1].last == chain.count - 1
        kept = all(each.again is None for each in decisions)
        if not kept:
            continue
        parts = tuple(Part(each.first, each.last) for each in decisions)
        cost = played(chain, parts, [each.moved for each in decisions], room, in_flight)
        assert cost is not None
        assert cost.needs <= memory
        assert cost.seconds == pytest.approx(plan.seconds(memory), rel=1e-6)


def going(chain: Chain, layer: int) -> int:
    return chain.saved[layer] - (chain.sizes[-1] if layer == chain.count - 1 else 0)


def test_a_link_that_is_free_moves_as_few_bytes_as_the_memory_asks_for() -> None:
    chain = Chain(7, count=6)
    plan = MovePlan(chain.costs(), Link(lambda num_bytes: 0.0, max(chain.saved), 4), MEMORY, MEMORY)
    fastest = sum(chain.forward) + sum(chain.backward)
    moved = []
    for memory in range(plan.levels[-1], MEMORY + 1):
        assert plan.seconds(memory) == pytest.approx(fastest)
        moved.append(sum(going(chain, each.first) for each in plan.decisions(memory) if each.moved))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0 < moved[0]


def test_programs_beside_the_found_ones_differ_in_one_move_and_are_not_more_than_the_most() -> None:
    """Of 200 layers that keep their graphs every second one, of three each, of layers that run again none."""
    again = (Segment(0, 2, recompute=True),)
    for count, expected in ((200, 100), (3, 3)):
        kept = tuple(Segment(at, at) for at in range(count))
        found = [each.program for each in with_neighbours([Candidate("dp", kept)])]
        assert found[0] == kept
        assert len(set(found)) == 1 + expected
    assert list(with_neighbours([Candidate("dp", again)])) == [Candidate("dp", again)]
