"""Programs that are chosen under a memory limit: what they cost, what is told, and that the limit is kept."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from plan_profiles import layer, model
from programs import make_blocks, measured_and_predicted, points
from torch import nn

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.config.units import format_bytes
from runner.memory.solve.program import check_program
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import Program, Segment, StageChain
from runner.model.layers import layers_of
from runner.plan.choice_notes import front
from runner.plan.make import make_plan
from runner.plan.render import to_table
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.schedule.values import Schedule

SAMPLES = 1024
SCALARS = 80  # at most so many bytes of losses and totals, which a plan adds to what is predicted of the layers
KEPT = {"saves_output": False, "unsaved_forward_bytes": 14}


@cache
def blocks() -> ModelProfile:
    """Ten blocks with dropout, of which each next one takes longer."""
    inputs, targets = (value[: SAMPLES // 4] for value in points(SAMPLES))
    made = profile_layers(layers_of(make_blocks(), 0), inputs, targets, nn.functional.mse_loss, torch.float32)
    rows = (
        replace(row, forward_seconds=1.0 + at / 10, backward_seconds=2.0 + at / 5) for at, row in enumerate(made.layers)
    )
    return replace(made, layers=tuple(rows), optimizer_bytes_per_gradient_byte=2.0)


@cache
def planned(policy: str, pipeline: int, limit: int | None, schedule: str = "1f1b") -> RunPlan:
    words = ["model=mlp", f"data.batch_size={SAMPLES}", f"schedule={schedule}", "schedule.microbatches=4"]
    words += [f"parallelism.pipeline={pipeline}", "partition=uniform", f"activation_checkpoint={policy}"]
    return make_plan(resolve([*words, *([f"memory_limit={limit}"] if limit else [])]), blocks())


@cache
def measured(programs: tuple[Program, ...], schedule: str | Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found, told = measured_and_predicted(make_blocks, nn.functional.mse_loss, points(SAMPLES), programs, schedule)
    return tuple(found), told


def grid(pipeline: int, count: int, schedule: str) -> list[int]:
    """Limits from a tenth above the plain peak down to below what is possible."""
    most = max(planned("none", pipeline, None, schedule).memory.peak_bytes)
    least = max(planned("full", pipeline, None, schedule).memory.peak_bytes)
    top, bottom = int(1.1 * most), int(0.6 * least)
    return [top - (top - bottom) * number // (count - 1) for number in range(count)]


def limits_are_kept(policy: str, pipeline: int, count: int, schedule: str = "1f1b") -> None:
    plans = [planned(policy, pipeline, limit, schedule) for limit in grid(pipeline, count, schedule)]
    feasible = [plan for plan in plans if plan.fits]
    assert plans[: len(feasible)] == feasible  # what fits is never below what does not
    assert 1 < len(feasible) < len(plans)
    runs = [measured(plan.activations.stages, plan.schedule) for plan in feasible]  # its order may follow the profile
    for plan, (found, told) in zip(feasible, runs, strict=True):
        peaks = plan.memory.peak_bytes
        assert all(0 <= peak - expected <= SCALARS for peak, expected in zip(peaks, told, strict=True))
        assert max(found) <= plan.memory_limit_bytes
        assert all(0.99 * expected <= each <= expected + SCALARS for each, expected in zip(found, told, strict=True))
    for (more, _), (less, _) in pairwise(runs):
        assert max(less) <= max(more)
    seconds = [plan.time.step_seconds for plan in feasible]
    assert seconds == pytest.approx(sorted(seconds))
    assert feasible[0].activations.stages == planned("none", pipeline, None, schedule).activations.stages


@pytest.mark.parametrize("asked", ["1f1b", "zb_v"])
def test_a_rank_into_which_everything_fits_keeps_everything(asked: str) -> None:
    """Also where backwards are in two parts, of which the estimate for a single stage is a bound."""
    plain = planned("none", 2, None, asked).memory.peak_bytes
    for limit in plain:
        peaks = planned("rotor", 2, limit, asked).memory.peak_bytes
        assert [peak for peak, most in zip(peaks, plain, strict=True) if most <= limit] == [
            most for most in plain if most <= limit
        ]


@pytest.mark.costly
def test_the_limit_is_kept_and_less_memory_never_takes_more() -> None:
    limits_are_kept("auto", 2, 5)


def test_the_last_message_of_a_step_is_there_until_the_next_one_leaves() -> None:
    """Under gpipe that is after the peak of the next step, on every rank that has sent a gradient."""
    programs = planned("none", 3, None, "gpipe").activations.stages
    found, told = measured(programs, "gpipe")
    assert all(0 <= each - expected <= SCALARS for each, expected in zip(found, told, strict=True))


class _WideForward(nn.Module):
    """Makes a large tensor in its forward alone, so that a rank's peak is in the forward before its backwards."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            middle = value.repeat(1, 32).mean()
        return torch.tanh(value - middle)


def _wide_forwards() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), _WideForward()) for _ in range(4)))


def test_a_gradient_has_no_memory_before_its_own_forward_has_run() -> None:
    """Under gpipe nothing is between the last forward of a rank and its own backward."""
    whole = tuple((Segment(2 * rank, 2 * rank + 1),) for rank in range(2))
    found, told = measured_and_predicted(_wide_forwards, nn.functional.mse_loss, points(SAMPLES), whole, "gpipe")
    assert all(0 <= each - expected <= SCALARS for each, expected in zip(found, told, strict=True))


def test_auto_is_as_fast_as_every_strategy_that_fits() -> None:
    for limit in grid(1, 6, "1f1b")[1:4]:
        best = planned("auto", 1, limit)
        for other in ("none", "full", "rotor"):
            plan = planned(other, 1, limit)
            assert not plan.fits or plan.time.step_seconds >= best.time.step_seconds


def test_early_stages_which_hold_more_microbatches_run_more_again() -> None:
    large = {"saved_bytes": 30_000, "output_bytes": 10_000, "unsaved_forward_bytes": 14_000, "saves_output": False}
    profile = model([layer(**large)] * 8)
    words = ["model=mlp", "parallelism.pipeline=4", "schedule=1f1b", "schedule.microbatches=8", "data.batch_size=8"]
    plain = make_plan(resolve(words), profile)
    limit = round(0.75 * max(plain.memory.peak_bytes))
    plan = make_plan(resolve([*words, "activation_checkpoint=auto", f"memory_limit={limit}"]), profile)
    assert plan.fits
    again = [figures.backward_seconds for figures in plan.figures]
    assert again == sorted(again, reverse=True)
    assert again[0] > again[-1]
    assert plan.activations.stages[-1] == (Segment(6, 7),)


def test_it_is_explained_in_three_lines() -> None:
    top, *_, low, _ = grid(1, 6, "1f1b")
    plan = planned("auto", 1, low)
    lines = [line for line in plan.advice if "stage" in line]
    (choice,) = plan.activations.choices
    least = min(choice.offers, key=lambda offer: offer.peak_bytes)
    assert len(lines) == 3
    assert lines[0].startswith(f"activation_checkpoint=auto takes for stage 0 {choice.chosen.name} (")
    assert lines[1].startswith("faster for stage 0 is ")
    assert lines[2].startswith(f"stage 0 can do with {format_bytes(least.peak_bytes)} at least, by {least.name} in ")
    assert any("nothing is faster" in line for line in planned("auto", 1, top).advice)
    shown = " ".join(to_table(plan).split())  # titles and cells may be folded
    assert "stage 0: time by bytes for activations, 1.00 if all are kept" in shown
    (told,) = plan.to_json()["activation_choices"]
    assert told["chosen"] == choice.chosen._asdict()
    assert [offer["seconds"] for offer in told["front"]] == sorted(offer["seconds"] for offer in told["front"])


def test_the_front_has_no_offer_that_another_one_beats() -> None:
    (choice,) = planned("auto", 1, grid(1, 6, "1f1b")[2]).activations.choices
    best = front(choice.offers)
    for offer in choice.offers:
        assert any(each.seconds <= offer.seconds and each.peak_bytes <= offer.peak_bytes for each in best)
    assert all(a.seconds <= b.seconds and a.peak_bytes > b.peak_bytes for a, b in pairwise(best))


def test_a_limit_that_nothing_keeps_is_told_with_the_least_that_is_possible() -> None:
    plan = planned("auto", 1, grid(1, 6, "1f1b")[-1])
    assert not plan.fits
    (problem,) = plan.problems
    assert problem.path == "memory_limit"
    (choice,) = plan.activations.choices
    assert choice.chosen.peak_bytes == min(offer.peak_bytes for offer in choice.offers)


def test_a_resolution_that_is_too_coarse_is_refused() -> None:
    (problem,) = rules(resolve(["model=mlp", "activation_checkpoint=rotor", "activation_checkpoint.resolution=1"]))
    assert problem.line().startswith("activation_checkpoint.resolution = 1: must be from 10 to 5000.")


OFFERING = [name for name, each in STRATEGIES.items() if each.candidates is not None]


@pytest.mark.parametrize("name", OFFERING)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_candidates_are_programs_and_do_not_depend_on_the_budget(name: str, in_flight: int) -> None:
    make = STRATEGIES[name].candidates
    assert make is not None
    chain = StageChain(model([layer(**KEPT)] * 9), 1, 7, in_flight=in_flight)
    candidates = list(make(chain))
    assert candidates == list(make(replace(chain, budget_bytes=50)))
    for each in candidates:
        if isinstance(each.program, tuple):
            assert check_program(each.program, 1, 7) is None
        else:
            assert (each.program.first, each.program.last) == (1, 7)
        assert each.name.startswith(name) or name == "auto"
