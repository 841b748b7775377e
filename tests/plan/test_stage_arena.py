"""The arena of a stage: its bound is the stage's predicted peak, and the plan tells it beside best fit."""

from __future__ import annotations

import random

import pytest
from plan_profiles import layer, loss_layer, model

from runner.config.compose.resolve import resolve
from runner.config.units import format_bytes
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.offload import moving
from runner.memory.solve.values import ActivationPlan, ChainProgram, Segment
from runner.plan.choices import stage_peak
from runner.plan.make import make_plan
from runner.plan.memory.stage_arena import stage_arena, stage_moments
from runner.plan.stages.figures import stage_figures
from runner.profile import ModelProfile

STAGES = ((0, 3), (4, 7))


def profile_of(seed: int) -> ModelProfile:
    """Layers of some sizes; the next one needs their input, their output, or neither."""
    chance = random.Random(seed)
    rows = [
        layer(
            saved_bytes=chance.randrange(100, 1000) + 10,
            forward_transient_bytes=chance.randrange(200),
            backward_transient_bytes=chance.randrange(10, 200),
            saves_input=chance.random() < 0.5,
            saves_output=chance.random() < 0.5,
        )
        for _ in range(8)
    ]
    return model(rows, loss=loss_layer(saved_bytes=5, forward_transient_bytes=3, backward_transient_bytes=9))


def program_of(seed: int, first: int, last: int, kind: str) -> ChainProgram:
    chance = random.Random(f"{seed} {first}")
    middle = (first + last) // 2
    kept: ChainProgram = (Segment(first, last),)
    if kind == "again":
        kept = (Segment(first, middle, recompute=True), Segment(middle + 1, last))
    if kind in ("kept", "again"):
        return kept
    chosen = [at for at in range(first, last + 1) if chance.random() < 0.6]
    return moving(kept, chosen, one_by_one=kind == "one by one")


@pytest.mark.costly
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("kind", ["kept", "again", "moved", "one by one"])
@pytest.mark.parametrize("seed", range(4))
def test_the_most_bytes_alive_are_the_stages_predicted_peak(seed: int, kind: str, in_flight: int) -> None:
    plan = ActivationPlan(tuple(program_of(seed, first, last, kind) for first, last in STAGES))
    made = adjusted(profile_of(seed), plan)
    for figures in stage_figures(made, STAGES):
        moments = list(stage_moments(made, figures, in_flight))
        assert all(size >= 0 for held in moments for size in held.values())
        assert max(sum(held.values()) for held in moments) == stage_peak(figures, in_flight)
        arena = stage_arena(made, figures, in_flight)
        assert arena.bound_bytes == stage_peak(figures, in_flight) <= arena.arena_bytes <= arena.best_fit_bytes


def test_the_plan_of_autoswap_tells_the_arena_of_each_stage() -> None:
    words = ["model=mlp", "parallelism.pipeline=2", "schedule=1f1b", "schedule.microbatches=4", "partition=uniform"]
    config = resolve([*words, "offload=activations_autoswap", "device=cpu", "memory_limit=1GB"])
    plan = make_plan(config, profile_of(0))
    arenas = plan.to_json()["activation_arenas"]
    peaks = [stage_peak(figures, count) for figures, count in zip(plan.figures, plan.in_flight, strict=True)]
    assert [each["bound_bytes"] for each in arenas] == peaks
    assert all(each["bound_bytes"] <= each["arena_bytes"] <= each["best_fit_bytes"] for each in arenas)
    (note,) = (line for line in plan.advice if "arena" in line)
    largest = format_bytes(max(each["arena_bytes"] for each in arenas))
    assert note.startswith(f"offload.activations=autoswap: an arena of {largest} has a place for everything")
    assert "planned and not used" in note


def test_the_plan_of_another_strategy_tells_no_arena() -> None:
    plan = make_plan(resolve(["model=mlp", "offload=activations_greedy", "device=cpu"]), profile_of(0))
    assert "activation_arenas" not in plan.to_json()
