"""Rotor: its dynamic program beside all persistent schedules of small chains, played by a simulator of their memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from plan_profiles import layer, model
from test_budgets import KEPT

from runner.memory.solve.build import Cut, Keep, program_of
from runner.memory.solve.long_chains import in_groups
from runner.memory.solve.program import check_program
from runner.memory.solve.solvers.in_flight import FirstForward
from runner.memory.solve.solvers.persistent import ChainCosts, PersistentPlan
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import ChainProgram, StageChain
from runner.plan.choices import program_cost


class Part(NamedTuple):
    """Layers first .. last of a schedule: one that keeps its graph, or a part that is run again by the parts inside."""

    first: int
    last: int
    inside: tuple[Part, ...] | None = None


Parts = tuple[Part, ...]


def schedules(first: int, last: int, whole: bool = True) -> Iterator[Parts]:
    """Every persistent schedule of a part; what is run again is not cut off as a whole once more."""
    if first > last:
        yield ()
        return
    for rest in schedules(first + 1, last, whole=False):
        yield (Part(first, first), *rest)
    for end in range(first, last if whole else last + 1):
        for inside in schedules(first, end):
            for rest in schedules(end + 1, last, whole=False):
                yield (Part(first, end, inside), *rest)


class Chain:
    """A small random chain with whole numbers of bytes and seconds, and a simulator of its memory."""

    def __init__(self, seed: int, count: int) -> None:
        draw = random.Random(seed).randint
        self.count = count
        self.sizes = [draw(1, 6) for _ in range(count + 1)]
        self.saved = [self.sizes[at + 1] + draw(0, 8) for at in range(count)]
        self.more_forward = [draw(0, 3) for _ in range(count)]
        self.more_backward = [draw(0, 6) for _ in range(count)]
        self.forward = [draw(1, 9) for _ in range(count)]
        self.backward = [draw(1, 9) for _ in range(count)]

    def costs(self) -> ChainCosts:
        names = ("forward", "backward", "sizes", "saved")
        more = self.more_forward, self.more_backward
        return ChainCosts(*(np.array(values, dtype=float) for values in (*(getattr(self, x) for x in names), *more)))

    def seconds(self, parts: Parts) -> int:
        total = 0
        for part in parts:
            if part.inside is None:
                total += self.forward[part.first] + self.backward[part.first]
            else:
                total += sum(self.forward[part.first : part.last + 1]) + self.seconds(part.inside)
        return total

    def peak(self, parts: Parts, held: int = 0) -> int:
        """The most bytes while parts run forward and backward; ``held`` does not count the input of the first."""
        gradient, most, end = self.sizes[parts[-1].last + 1], 0, parts[-1].last
        for part in parts:
            if part.inside is None:
                most = max(most, held + gradient + self.saved[part.first] + self.more_forward[part.first])
                held += self.saved[part.first]
                continue
            for at in range(part.first, part.last + 1):
                own_input = self.sizes[at] if at > part.first else 0
                most = max(most, held + gradient + own_input + self.sizes[at + 1] + self.more_forward[at])
            held += self.sizes[part.last + 1] if part.last < end else 0
        for part in reversed(parts):
            if part.inside is None:
                running = self.sizes[part.first + 1] + self.more_backward[part.first]
                most = max(most, held + running)
                held -= self.saved[part.first]
            else:
                held -= self.sizes[part.last + 1] if part.last < end else 0
                most = max(most, self.peak(part.inside, held))
        assert held >= 0
        return most


def as_parts(program: ChainProgram) -> Parts:
    """A program as the simulator takes it."""
    found: list[Part] = []
    for each in program:
        inside = as_parts(each.inside) if each.inside else tuple(Part(x, x) for x in range(each.first, each.last + 1))
        kept = (Part(x, x) for x in range(each.first, each.last + 1))
        found += [Part(each.first, each.last, inside)] if each.recompute else kept
    return tuple(found)


def compare(seed: int, count: int) -> None:
    """At every number of bytes: the least seconds of all schedules, and a program of just these seconds that fits."""
    chain = Chain(seed, count)
    played = [(chain.peak(parts), chain.seconds(parts)) for parts in schedules(0, count - 1)]
    most = int(chain.costs().peak)
    plan = PersistentPlan(chain.costs(), most, most)

    def decide(first: int, last: int, memory: int) -> Cut[int] | Keep[int]:
        step = plan.step(first, last, memory)
        return Keep(first, step.rest) if step.until is None else Cut(step.until - 1, memory, step.rest)

    for memory in range(most + 1):
        expected = min((seconds for peak, seconds in played if peak <= memory), default=float("inf"))
        assert plan.seconds(0, count - 1, memory) == expected
        if expected < float("inf"):
            made = as_parts(program_of(0, count - 1, memory, decide))
            assert chain.seconds(made) == expected
            assert chain.peak(made) <= memory
    assert plan.seconds(0, count - 1, most) == sum(chain.forward) + sum(chain.backward)


@pytest.mark.parametrize("count", [3, 4])
def test_it_is_the_fastest_of_all_persistent_schedules(count: int) -> None:
    for seed in range(12):
        compare(seed, count)


@pytest.mark.full
def test_it_is_the_fastest_of_all_persistent_schedules_of_2000_chains() -> None:
    for seed in range(2000):
        compare(seed, 3 + seed % 3)


def left_by_the_first_forward(chain: Chain, parts: Parts) -> int:
    """Bytes that a first forward leaves: graphs, and inputs of what follows a part that is cut off."""
    kept = sum(chain.saved[part.first] for part in parts if part.inside is None)
    return kept + sum(chain.sizes[part.last + 1] for part in parts if part.inside and part.last < chain.count - 1)


def test_what_first_forwards_leave_and_what_second_runs_take_are_bounded_apart() -> None:
    """With several micro-batches in flight: all schedules of small chains, with both of their bytes counted."""
    for seed in range(6):
        chain = Chain(seed, 3)
        most = int(chain.costs().peak)
        plan = PersistentPlan(chain.costs(), most, most)
        played = [
            (
                left_by_the_first_forward(chain, parts),
                max((chain.peak(part.inside) for part in parts if part.inside), default=0),
                chain.seconds(parts),
            )
            for parts in schedules(0, 2, whole=False)
        ]
        for again in range(0, most + 1, 3):
            table = FirstForward(plan, 3, again, plan.keeping_all)
            for stash, seconds in table.levels:
                fitting = [told for left, peak, told in played if left <= stash and peak <= again]
                assert seconds == min(fitting)

                first, left, spent = 0, stash, 0.0
                while first < 3:
                    until, left, _ = table.step(first, left)
                    if until is None:
                        spent += plan.own(first)[0]
                    else:
                        spent += plan.forward(first, until - 1) + plan.seconds(first, until - 1, again)
                    first = first + 1 if until is None else until
                    assert left >= 0
                assert spent == seconds


@pytest.mark.costly
def test_a_chain_of_very_many_layers_is_planned_in_groups() -> None:
    """A thousand layers would take minutes and gigabytes; all programs are of the layers themselves."""
    count = 300
    long = StageChain(model([layer(**KEPT)] * count), 1, count - 2)
    programs = [each.program for each in STRATEGIES["rotor"].candidates(long)]  # type: ignore[misc]
    assert len(programs) > 10
    assert all(check_program(program, 1, count - 2) is None for program in programs if isinstance(program, tuple))
    kept, *costs = (program_cost(long, program) for program in programs)
    assert min(cost.seconds for cost in costs) < 1.1 * kept.seconds
    least = min(cost.peak_bytes for cost in costs)
    assert least < 1.1 * program_cost(long, STRATEGIES["chen_sqrt"](long)).peak_bytes


def test_few_layers_are_planned_one_by_one() -> None:
    chain = StageChain(model([layer(**KEPT)] * 12), 2, 9)
    alone = list(STRATEGIES["rotor"].candidates(chain))  # type: ignore[misc]
    assert list(in_groups(STRATEGIES["rotor"].candidates, chain, 8)) == alone  # type: ignore[arg-type]
    assert list(in_groups(STRATEGIES["rotor"].candidates, chain, 4)) != alone  # type: ignore[arg-type]
