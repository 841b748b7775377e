"""``schedule=auto`` of a plan, against the plans of all schedules by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
from plan_profiles import layer, model

from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.plan import make
from runner.plan.draft.draft import Draft
from runner.plan.make import make_plan
from runner.plan.search.choose import with_named_order
from runner.plan.values import RunPlan
from runner.schedule.catalogue.registry import SEARCHED
from runner.schedule.generators.search import search
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.values import Schedule

SLOW = layer(forward_seconds=2.0, backward_seconds=6.0, input_gradient_seconds=4.0, weight_gradient_seconds=2.0)
EVEN = [layer()] * 8
UNEVEN = [layer(), SLOW, layer(), layer(), layer(), SLOW, layer(), layer()]


def request(name: str, chunks: int | None = None, **changes: Any) -> RunConfig:
    config = RunConfig(memory_limit="1GB")
    config.schedule.name, config.schedule.chunks, config.schedule.microbatches = name, chunks, 6
    config.parallelism.pipeline, config.data.batch_size = 4, 6
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def planned(name: str, chunks: int | None = None, layers: list[Any] = UNEVEN, **changes: Any) -> RunPlan:
    return make_plan(request(name, chunks, **changes), model(layers))


def unequal(rng: random.Random, count: int) -> list[Any]:
    return [
        layer(forward_seconds=f, backward_seconds=2 * f, input_gradient_seconds=f, weight_gradient_seconds=f)
        for f in (rng.uniform(0.5, 2.0) for _ in range(count))
    ]


def plans_by_name(**changes: Any) -> list[RunPlan]:
    found = []
    for spec in SEARCHED:
        for chunks in (1, 2):
            if spec.accepts(ScheduleRequest(4, 6, chunks)):
                found.append(planned(spec.name, chunks, **changes))
    return found


def test_no_schedule_by_name_is_planned_to_be_shorter() -> None:
    auto = planned("auto")
    assert auto.time.step_seconds <= min(plan.time.step_seconds for plan in plans_by_name())
    assert auto.fits
    assert auto.advice[0].startswith("schedule=auto takes ")
    assert "next is " in auto.advice[0]


@pytest.mark.parametrize("seed", [0, 2])
def test_an_order_is_left_out_only_where_it_would_not_be_taken(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning every published order gives the same plan and the same words about it."""
    rng = random.Random(seed)
    layers = unequal(rng, 16)
    made: list[Schedule] = []

    def counted(draft: Draft, *given: Any) -> RunPlan:
        made.append(draft.schedule)
        return plan_of(draft, *given)

    plan_of = make._plan_of
    monkeypatch.setattr(make, "_plan_of", counted)
    limit = ("1GB", "1GB", f"{rng.randint(20, 60)}kB")[seed % 3]
    few, tried = planned("auto", layers=layers, memory_limit=limit), len(made)
    monkeypatch.setattr("runner.plan.search.choose._Bounds.of", lambda bounds, schedule: None)
    made.clear()
    every = planned("auto", layers=layers, memory_limit=limit)
    assert (few.schedule, few.advice, few.partition) == (every.schedule, every.advice, every.partition)
    assert tried < len(made) or not few.fits


def test_a_search_that_is_too_much_work_takes_a_published_order_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.schedule.generators.search._WORK", 0)
    auto = planned("auto")
    assert auto.schedule.name != "auto"
    assert auto.advice[0].endswith("further orders from list scheduling were left out, which would take long")
    assert auto.time.step_seconds <= min(plan.time.step_seconds for plan in plans_by_name())


@pytest.mark.costly
def test_where_steps_overlap_an_order_is_not_left_out_by_the_length_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(30)
    layers = unequal(rng, rng.choice((8, 12, 16)))

    def overlapping() -> RunPlan:
        config = request("auto")
        config.schedule.post_validation = True
        config.schedule.microbatches = config.data.batch_size = 12
        return make_plan(config, model(layers))

    few = overlapping()
    monkeypatch.setattr("runner.plan.search.choose._Bounds.of", lambda bounds, schedule: None)
    every = overlapping()
    assert (few.schedule, few.advice) == (every.schedule, every.advice)


@pytest.mark.costly
def test_under_a_memory_limit_it_takes_what_fits_and_says_what_did_not() -> None:
    peaks = sorted({max(plan.peak_memory_bytes) for plan in plans_by_name()})
    limit = f"{peaks[len(peaks) // 3]}B"
    auto = planned("auto", memory_limit=limit)
    fitting = [plan for plan in plans_by_name(memory_limit=limit) if plan.fits]
    assert auto.fits
    assert auto.time.step_seconds <= min(plan.time.step_seconds for plan in fitting)
    if min(plan.time.step_seconds for plan in plans_by_name()) < auto.time.step_seconds:
        assert " would take " in auto.advice[0]
    assert max(auto.peak_memory_bytes) <= peaks[len(peaks) // 3] < peaks[-1]


def test_where_nothing_fits_it_is_refused_as_any_other() -> None:
    auto = planned("auto", memory_limit="10B")
    assert not auto.fits
    assert auto.problems


def test_where_every_schedule_is_refused_the_reason_is_told() -> None:
    with pytest.raises(RequestError, match="layers"):
        planned("auto", layers=[layer()] * 3)


def test_asynchronous_orders_are_considered_only_where_they_are_allowed() -> None:
    refused = planned("auto", layers=EVEN)
    assert not refused.schedule.is_asynchronous
    config = request("auto")
    vars(config.schedule).update(asynchronous="allowed")
    allowed = make_plan(config, model(EVEN))
    assert allowed.schedule.is_asynchronous
    assert allowed.time.step_seconds < refused.time.step_seconds
    assert allowed.advice[0].startswith(f"schedule=auto takes {allowed.schedule.name}, which is asynchronous: ")
    assert " late; synchronous: schedule=auto takes " in allowed.advice[0]
    assert not allowed.schedule.reads_newest  # ampnet is as short, but mixes two versions in a gradient


def test_where_a_rule_forbids_asynchronous_orders_auto_takes_another() -> None:
    config = request("auto")
    vars(config.schedule).update(asynchronous="allowed")
    config.trainer.grad_clip_norm = 1.0
    assert not make_plan(config, model(EVEN)).schedule.is_asynchronous


@pytest.mark.costly
def test_advice_searches_no_second_time_and_fits_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def counted(*given: Any) -> Any:
        searches.append(given)
        return search(*given)

    def split(microbatches: int, limit: int) -> RunPlan:
        config = request("auto", memory_limit=f"{limit}B")
        config.schedule.microbatches, config.data.batch_size = microbatches, 64
        return make_plan(
            config, model([layer(saved_bytes=40_000 // microbatches)] * 8, samples=64 // microbatches), suggest=True
        )

    peak = max(split(4, 10**9).peak_memory_bytes)
    monkeypatch.setattr("runner.plan.search.choose.search", counted)
    plan = split(4, peak // 4)
    assert len(searches) == 1
    assert not plan.fits
    (told,) = [word for word in plan.problems[0].fix.split() if word.startswith("schedule.microbatches=")]
    assert split(int(told.partition("=")[2]), peak // 4).fits
    asked = request(plan.schedule.name, plan.schedule.chunks)
    assert with_named_order(asked, plan.schedule) is asked
