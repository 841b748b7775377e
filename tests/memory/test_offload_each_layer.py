"""Strategies that keep, move or run again each layer, and move boundaries, beside every program and every partition."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
from plan_profiles import layer, model
from test_offload_choice import chain_of, chosen, with_budget, within

from runner.config.compose.resolve import resolve
from runner.errors import Problem
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.values import ActivationPlan, ChainProgram, Segment, StageChain
from runner.plan.choices import ProgramChoice, program_cost
from runner.plan.make import make_plan
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.stages.figures import stage_figures
from runner.plan.time.predict import predict_time
from runner.plan.values import Link, RunPlan
from runner.profile import ModelProfile

WAYS = [(False, False), (True, False), (False, True)]


def every_program(first: int, count: int) -> list[ChainProgram]:
    """Every layer kept, moved or run again."""
    return [
        tuple(Segment(first + at, first + at, moved=moves, recompute=again) for at, (moves, again) in enumerate(each))
        for each in product(WAYS, repeat=count)
    ]


def best_of_all(chain: StageChain, names: tuple[str, ...]) -> None:
    choose = ProgramChoice()
    costs = [program_cost(chain, each) for each in every_program(chain.first, len(chain.layers))]
    for limited in with_budget(chain, OFFLOADS[names[0]], choose):
        best = min(cost.seconds for cost in costs if within(limited, cost.peak_bytes))
        for name in names:
            found = chosen(limited, OFFLOADS[name], choose)[1]
            assert within(limited, found.peak_bytes)
            assert found.seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("speed", "in_flight"), [(None, 1), (50.0, 3), (1000.0, 1)])
def test_the_choice_is_that_of_all_programs(speed: float | None, in_flight: int) -> None:
    best_of_all(chain_of(2, 4, 0, speed, in_flight), ("mpress", "vpipe"))


def test_a_choice_of_tensors_that_layers_share_is_that_of_all_programs() -> None:
    """Layers that save their inputs and outputs, which the layers before and after hold as well."""
    rows = [layer(saved_bytes=60 + 10 * at, output_bytes=30 + at, forward_seconds=1.0 + at / 7) for at in range(5)]
    chain = StageChain(model(rows), 0, 3, {}, 0, 2, lambda num_bytes: num_bytes / 40)
    best_of_all(chain, ("mpress",))


@pytest.mark.costly
def test_a_long_stage_is_never_slower_than_by_its_groups_or_by_pofo() -> None:
    choose = ProgramChoice()
    for chain in with_budget(chain_of(4, 12, 0, 50.0, 3), OFFLOADS["pofo"], choose)[1:4:2]:
        found, pofo = (chosen(chain, OFFLOADS[name], choose)[1] for name in ("mpress", "pofo"))
        assert found.seconds <= pofo.seconds


@pytest.mark.parametrize(("speed", "in_flight"), [(None, 3), (200.0, 1)])
def test_one_ahead_fits_where_greedy_does_not(speed: float | None, in_flight: int) -> None:
    """The same first layers: with room it is never slower, and it can do with less."""
    for seed in range(2):
        choose = ProgramChoice()
        chain = chain_of(seed, 6, 0, speed, in_flight)
        least = [chosen(chain, OFFLOADS[name], choose)[1].peak_bytes for name in ("tflms", "greedy")]
        assert least[0] <= least[1]
        for limited in with_budget(chain, OFFLOADS["greedy"], choose):
            found, greedy = (chosen(limited, OFFLOADS[name], choose)[1] for name in ("tflms", "greedy"))
            assert within(limited, found.peak_bytes) >= within(limited, greedy.peak_bytes)
            assert found.seconds <= greedy.seconds or not within(limited, greedy.peak_bytes)


def test_one_ahead_is_another_choice_than_greedy() -> None:
    """Small loads after a large one: several of them are on their way at once, or one."""
    sizes = (1010, 110, 110, 110, 110, 110)
    rows = [layer(saved_bytes=size, saves_input=False, saves_output=False) for size in sizes]
    rows[-1] = replace(rows[-1], forward_transient_bytes=5000)
    chain = StageChain(model(rows), 0, 5, {}, 0)
    tflms, greedy = (chosen(chain, OFFLOADS[name]) for name in ("tflms", "greedy"))
    assert greedy[1].peak_bytes - tflms[1].peak_bytes == 3 * 100
    ahead = [each.one_by_one for each in tflms[0] if each.moved]
    assert ahead == [True] * len(ahead) != []


LAYERS = 6
WORDS = ("model=mlp", "schedule=1f1b", "schedule.microbatches=4", "data.batch_size=4", "device=cpu")


@pytest.fixture
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of other layouts, with which a plan is compared, take most of the time."""
    monkeypatch.setattr("runner.plan.make.misfit", lambda *_, **__: Problem("memory_limit", 0, "is exceeded"))
    monkeypatch.setattr("runner.plan.make.compare_without_pipeline", lambda *_, **__: None)


@cache
def uneven() -> ModelProfile:
    """Layers of which the first ones save much and take little time, and the last ones the other way round."""
    rows = [
        layer(
            saved_bytes=9_000 - 1_000 * at,
            saves_input=False,
            saves_output=False,
            unsaved_forward_bytes=15,
            forward_seconds=(seconds := 1.0 + 0.6 * at * (at % 3)),
            backward_seconds=2 * seconds,
        )
        for at in range(LAYERS)
    ]
    return model(rows)


@cache
def planned(*words: str) -> RunPlan:
    return make_plan(resolve([*WORDS, "hardware.host_link_bytes_per_second=2000", *words]), uneven())


def limits(pipeline: int) -> list[int]:
    """From what a run needs that keeps everything to a little more than one does that can do with least."""
    layout = (f"parallelism.pipeline={pipeline}", "partition=uniform")
    most = max(planned(*layout).peak_memory_bytes)
    least = max(planned(*layout, "offload=activations_async").peak_memory_bytes)
    return [round(least + share * (most - least)) for share in (1.0, 0.6, 0.3, 0.1)]


@pytest.mark.costly
@pytest.mark.usefixtures("no_advice")
def test_boundaries_move_to_the_best_of_all_cuts() -> None:
    """Every cut is planned by itself, with the best programs of its stages; the best of them is the best of all."""
    cuts = [",".join(map(str, each)) for each in combinations(range(1, LAYERS), 2)]
    asked = ("parallelism.pipeline=3", "offload=activations_vpipe", f"memory_limit={limits(3)[1]}")
    plans = [planned(*asked, "partition=manual", f"partition.boundaries=[{cut}]") for cut in cuts]
    assert planned(*asked).fits
    assert planned(*asked).time.step_seconds == min(plan.time.step_seconds for plan in plans if plan.fits)


@pytest.mark.usefixtures("no_advice")
def test_moved_boundaries_are_told_and_even_stages_are_kept_where_they_are_asked_for() -> None:
    asked = ("parallelism.pipeline=3", "offload=activations_vpipe", f"memory_limit={limits(3)[2]}")
    found, even = planned(*asked), planned(*asked, "partition=uniform")
    assert even.partition == ((0, 1), (2, 3), (4, 5))
    assert found.partition != even.partition
    assert found.time.step_seconds < even.time.step_seconds or not even.fits
    (told,) = [line for line in found.reasons if "moves boundaries" in line]
    assert told.startswith("offload.activations=vpipe moves boundaries: of 10 cuts, stages of ")
    mpress = planned(*(each.replace("vpipe", "mpress") for each in asked))
    assert not any("moves boundaries" in line for line in mpress.reasons)
    assert mpress.time.step_seconds >= found.time.step_seconds


@pytest.mark.usefixtures("no_advice")
def test_all_stages_together_are_the_best_of_all_programs() -> None:
    """Every program of every stage with every other, by the plan's peaks of ranks and its seconds of a step."""
    rows = uneven().layers[1:5]
    profile = replace(uneven(), layers=rows)
    layout = [*WORDS, "parallelism.pipeline=2", "partition=uniform", "hardware.host_link_bytes_per_second=2000"]
    kept = make_plan(resolve(layout), profile)
    limit = round(0.8 * max(kept.peak_memory_bytes))
    found = make_plan(resolve([*layout, "offload=activations_mpress", f"memory_limit={limit}"]), profile)
    seconds = []
    for programs in product(every_program(0, 2), every_program(2, 2)):
        costs = adjusted(profile, ActivationPlan(programs))
        figures = stage_figures(costs, found.partition)
        peaks = predict_memory(found.program, profile, figures, MemoryNeeds(4)).peak_bytes
        time = predict_time(found.program, profile, figures, mean_samples=1, host_link=Link(0.0, 2000.0))
        if max(peaks) <= limit:
            seconds.append(time.step_seconds)
    assert found.fits
    assert found.time.step_seconds == pytest.approx(min(seconds), rel=1e-9)
