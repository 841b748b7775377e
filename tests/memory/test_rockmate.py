"""Rockmate: layers that keep chosen operators' outputs among rotor's programs."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from test_rotor import Chain

from runner.memory.solve.program import check_program
from runner.memory.solve.solvers.in_flight import FirstForward, Partly
from runner.memory.solve.solvers.persistent import PersistentPlan
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import ChainProgram, StageChain
from runner.model.layers import layers_of
from runner.plan.choices import program_cost
from runner.profiling.model import profile_layers
from runner.recipes.rematerialization.models import MODELS


def some_ways(seed: int, count: int) -> list[list[Partly]]:
    draw = random.Random(seed).randint
    return [[Partly(f"way {at}", float(draw(2, 20)), draw(1, 8)) for at in range(draw(0, 2))] for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_first_forwards_are_the_fastest_of_all_ways(seed: int) -> None:
    count = 4
    chain, ways = Chain(seed, count), some_ways(seed, count)
    most = int(chain.costs().peak)
    plan = PersistentPlan(chain.costs(), most, most)
    table = FirstForward(plan, count, most // 2, plan.keeping_all, ways)
    found = all_sequences(chain, plan, ways, most // 2)
    assert any(units < plan.keeping_all for units, _ in found)
    assert table.levels
    for units, seconds in table.levels:
        assert seconds == pytest.approx(min(other for size, other in found if size <= units))


def all_sequences(chain: Chain, plan: PersistentPlan, ways: list[list[Partly]], again: int) -> list[tuple[int, float]]:
    """Units that a first forward leaves, and seconds, of every sequence of kept, partly kept and cut off layers."""
    found = []
    for ends in product((False, True), repeat=chain.count - 1):  # whether a part ends behind a layer
        edges = [0, *(at + 1 for at, is_end in enumerate(ends) if is_end), chain.count]
        parts = list(zip(edges, edges[1:], strict=False))
        for chosen in product(*(choices(chain, plan, ways, again, first, end) for first, end in parts)):
            found.append((sum(units for units, _ in chosen), sum(seconds for _, seconds in chosen)))
    return found


def choices(
    chain: Chain, plan: PersistentPlan, ways: list[list[Partly]], again: int, first: int, end: int
) -> list[tuple[int, float]]:
    """Units and seconds of each thing that may be done with a part: a cut, or of a single layer, to keep something."""
    size = chain.sizes[end] if end < chain.count else 0
    cut = plan.seconds(first, end - 1, again) + sum(chain.forward[first:end])
    found = [(size, cut)] if np.isfinite(cut) else []
    if end == first + 1:
        found.append((chain.saved[first], float(chain.forward[first] + chain.backward[first])))
        found += [(way.units, way.seconds) for way in ways[first]]
    return found


@cache
def gpt() -> StageChain:
    task = MODELS["GPT"]()
    sources = layers_of(task.build(), 0)
    profile = profile_layers(sources, *task.batch, task.loss, torch.float32)
    rows = (
        replace(row, forward_seconds=row.forward_flops, backward_seconds=row.backward_flops) for row in profile.layers
    )
    return StageChain(replace(profile, layers=tuple(rows)), 0, len(sources) - 1)


@cache
def programs_of(name: str, in_flight: int = 1) -> list[ChainProgram]:
    chain, make = gpt(), STRATEGIES[name].candidates
    assert make is not None
    of = StageChain(chain.profile, chain.first, chain.last, in_flight=in_flight)
    return [each.program for each in make(of) if isinstance(each.program, tuple)]


def test_layers_keep_operators_and_every_program_is_one_of_the_stage() -> None:
    chain, programs = gpt(), programs_of("rockmate")
    assert any(part.save_ops == "matmuls" for program in programs for part in program)
    for program in programs:
        assert check_program(program, chain.first, chain.last) is None
        assert all(part.first == part.last for part in program if part.save_ops is not None)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_it_is_as_fast_as_rotor_at_every_budget_and_faster_at_some(in_flight: int) -> None:
    of = StageChain(gpt().profile, gpt().first, gpt().last, in_flight=in_flight)
    costs = {
        name: [program_cost(of, program) for program in programs_of(name, in_flight)] for name in ("rotor", "rockmate")
    }
    faster = 0
    for budget, *_ in costs["rotor"]:
        rotor, rockmate = (
            min(cost.seconds for cost in costs[name] if cost.peak_bytes <= budget) for name in ("rotor", "rockmate")
        )
        assert rockmate <= rotor
        faster += rockmate < rotor
    assert faster
