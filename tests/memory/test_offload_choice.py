"""Offload strategies that choose under a budget, beside every subset of the layers, and beside each other."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from plan_profiles import layer, model

from runner.config.compose.resolve import resolve
from runner.memory.solve.offload import Offload, moving
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.offloads.autoswap import Scores
from runner.memory.solve.program import check_program
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, Offer, Segment, StageChain
from runner.plan.choices import ProgramChoice, program_cost
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profiling.model import profile_model

SMALL = ("model=mlp", "model.kwargs.width=48", "model.kwargs.layers=16", "data.batch_size=1024", "device=cpu")
COUNT = 6


def chain_of(
    seed: int, count: int = COUNT, budget: int = 0, bytes_per_second: float | None = None, in_flight: int = 1
) -> StageChain:
    """Layers that save some bytes beside their output of 10, of which the next one needs none; forwards take 1 to 4."""
    chance = random.Random(seed)
    rows = [
        layer(
            saved_bytes=chance.randrange(100, 1000) + 10,
            saves_input=False,
            saves_output=False,
            unsaved_forward_bytes=15,
            forward_seconds=(seconds := chance.uniform(1.0, 4.0)),
            backward_seconds=2 * seconds,
        )
        for _ in range(count)
    ]

    def copy_seconds(num_bytes: float) -> float:
        return num_bytes / bytes_per_second if bytes_per_second else 0.0

    return StageChain(model(rows), 0, count - 1, {}, budget, in_flight, copy_seconds)


def plain(chain: StageChain) -> ChainProgram:
    return (Segment(chain.first, chain.last),)


def chosen(
    chain: StageChain, strategy: Offload | Strategy, choose: ProgramChoice | None = None
) -> tuple[ChainProgram, Offer]:
    """What a strategy chooses; ``choose`` may know its programs already, of the same chain with another budget."""
    asked = strategy.over(STRATEGIES["none"]) if isinstance(strategy, Offload) else strategy
    program, choice = (choose or ProgramChoice())(chain, asked)
    assert isinstance(program, tuple)
    assert check_program(program, chain.first, chain.last) is None
    assert program_cost(chain, program) == choice.chosen[1:]
    return program, choice.chosen


def moved(program: ChainProgram) -> list[int]:
    return [each.first for each in program if each.moved]


def budgets(chain: StageChain, strategy: Offload, choose: ProgramChoice) -> list[int]:
    """From the least that a strategy can do with to what a stage takes that keeps everything."""
    least = chosen(chain, strategy, choose)[1].peak_bytes
    most = program_cost(chain, plain(chain)).peak_bytes
    return [round(least + share * (most - least)) for share in (0.0, 0.2, 0.5, 0.8, 1.0)]


def within(chain: StageChain, peak_bytes: int) -> bool:
    assert chain.budget_bytes is not None
    return peak_bytes <= chain.budget_bytes


def peak_of(chain: StageChain, layers: Collection[int]) -> int:
    """The peak of the program that moves what these layers save."""
    return program_cost(chain, moving(plain(chain), layers)).peak_bytes


def subsets(chain: StageChain) -> list[tuple[int, ...]]:
    return [each for count in range(chain.last + 2) for each in combinations(chain.indices, count)]


def with_budget(chain: StageChain, strategy: Offload, choose: ProgramChoice | None = None) -> list[StageChain]:
    return [replace(chain, budget_bytes=each) for each in budgets(chain, strategy, choose or ProgramChoice())]


@pytest.mark.parametrize("seed", range(2))
def test_greedy_moves_the_first_layers_as_few_as_fit(seed: int) -> None:
    counts = []
    for chain in with_budget(chain_of(seed), OFFLOADS["greedy"]):
        found = moved(chosen(chain, OFFLOADS["greedy"])[0])
        fitting = [each for each in subsets(chain) if within(chain, peak_of(chain, each))]
        firsts = [list(each) for each in fitting if list(each) == list(range(len(each)))]
        assert found == min(firsts, key=len)
        counts.append(len(found))
    assert counts[-1] == 0 < counts[0]


@pytest.mark.parametrize(
    ("name", "bound", "speed"), [("dp", 0.01, 200.0), ("dp", 0.01, None), ("autoswap", 0.15, 50.0)]
)
def test_no_strategy_is_far_from_the_best_of_all_subsets(name: str, bound: float, speed: float | None) -> None:
    excess = []
    for seed in range(2):
        choose = ProgramChoice()
        for chain in with_budget(chain_of(seed, 5, 0, speed), OFFLOADS["greedy"]):
            costs = [program_cost(chain, moving(plain(chain), each)) for each in subsets(chain)]
            best = min(cost.seconds for cost in costs if within(chain, cost.peak_bytes))
            excess.append(chosen(chain, OFFLOADS[name], choose)[1].seconds / best - 1)
    assert min(excess) >= -1e-9
    assert max(excess) <= bound


@pytest.mark.parametrize(("speed", "in_flight"), [(100.0, 1), (1000.0, 3)])
def test_both_together_are_never_slower_than_either(speed: float, in_flight: int) -> None:
    choose = ProgramChoice()
    for chain in with_budget(chain_of(1, COUNT, 0, speed, in_flight), OFFLOADS["pofo"], choose):
        joint = chosen(chain, OFFLOADS["pofo"], choose)[1]
        assert within(chain, joint.peak_bytes)
        for other in (OFFLOADS["dp"], OFFLOADS["greedy"], STRATEGIES["rotor"]):
            alone = chosen(chain, other, choose)[1]
            assert not within(chain, alone.peak_bytes) or joint.seconds <= alone.seconds


def test_without_a_link_nothing_is_moved_where_the_rest_suffices() -> None:
    choose = ProgramChoice()
    for chain in with_budget(chain_of(0, COUNT, 0, 1e-6), OFFLOADS["pofo"], choose):
        again = chosen(chain, STRATEGIES["rotor"], choose)[1]
        joint = chosen(chain, OFFLOADS["pofo"], choose)[1]
        if within(chain, again.peak_bytes):
            assert joint.moved_bytes == 0
            assert joint.seconds <= again.seconds


def test_with_a_free_link_nothing_is_computed_again_where_moves_suffice() -> None:
    choose, fastest = ProgramChoice(), program_cost(chain_of(0), plain(chain_of(0))).seconds
    for chain in with_budget(chain_of(0), OFFLOADS["greedy"]):
        program, offer = chosen(chain, OFFLOADS["pofo"], choose)
        assert offer.seconds == pytest.approx(fastest)
        assert not any(each.recompute for each in program)


def test_both_together_beat_either_alone_on_some_chain() -> None:
    chain = chain_of(0, 8, 0, 100.0, in_flight=4)
    chain = replace(chain, budget_bytes=round(0.35 * program_cost(chain, plain(chain)).peak_bytes))
    program, joint = chosen(chain, OFFLOADS["pofo"])
    assert any(each.recompute for each in program)
    assert joint.moved_bytes > 0
    for other in (OFFLOADS["dp"], STRATEGIES["rotor"]):
        alone = chosen(chain, other)[1]
        assert within(chain, alone.peak_bytes)
        assert joint.seconds < 0.99 * alone.seconds


def test_what_convolutions_save_is_moved_before_the_rest() -> None:
    shapes = [((8, 3, 3, 3), (8,)), ((8,),), ((4, 8, 5),), ((10, 8), (10,))]
    rows = [layer(saved_bytes=510, saves_input=False, saves_output=False, trained_shapes=each) for each in shapes]
    for expected in ([], [0, 2], [0, 1, 2, 3]):
        chain = StageChain(model(rows), 0, 3, {})
        peak = program_cost(chain, moving(plain(chain), expected)).peak_bytes
        assert moved(chosen(replace(chain, budget_bytes=peak), OFFLOADS["vdnn_dynamic"])[0]) == expected


def test_scores_of_absence_by_hand() -> None:
    scores = Scores(saved=[4.0, 2.0, 1.0], forward=[1.0, 1.0, 1.0], backward=[2.0, 2.0, 2.0], copying=[0.5, 0.25, 0.0])
    # absent: of the first layer two forwards and two backwards, of the second one each, of the last none
    assert scores.durations() == [6 - 1.0, 3 - 0.5, 0.0]
    assert scores.areas() == [20.0, 5.0, 0.0]
    # alive: 4, 6, 7 bytes in the forwards; 7, 6, 4 in the backwards
    assert scores.weighted() == [6 + 7 + 2 * (7 + 6), 7 + 2 * 7, 0.0]
    # the first layer is moved first, so 4 bytes less are alive: 2, 3, 3, 2
    assert scores.submodular() == [39.0, 3 + 2 * 3, 0.0]


@cache
def planned(*overrides: str) -> RunPlan:
    config = resolve([*SMALL, *overrides])
    return make_plan(config, profile_model(config))


@pytest.mark.costly
def test_a_plan_moves_what_its_limit_asks_for() -> None:
    offload = OFFLOADS["greedy"]
    order = ("parallelism.pipeline=2", "schedule.microbatches=4", "schedule=1f1b", "partition=uniform")
    layout = (*order, "hardware=laptop_cpu")  # seconds by FLOPs: those of a busy machine would be measured again
    kept, everything = planned(*layout), planned(*layout, "offload=activations_async")
    limit = sum(kept.peak_memory_bytes) // 2  # the last stage can keep everything
    plan = planned(*layout, f"offload.activations={offload.name}", f"memory_limit={limit}")
    assert plan.fits
    first, last = (figures.moved_bytes for figures in plan.figures)
    assert first > last
    assert 0 < plan.host_activation_bytes < everything.host_activation_bytes
    assert any(line.startswith(f"offload.activations={offload.name} takes") for line in plan.advice)
    roomy = planned(*layout, f"offload.activations={offload.name}", "memory_limit=8GB")
    assert roomy.host_activation_bytes == 0
    assert roomy.time.step_seconds == kept.time.step_seconds
