"""Ranks above their limit lend micro-batches to ranks with room: only then, as little as needed, as it is measured."""

from __future__ import annotations

from functools import cache

import pytest
from plan_profiles import layer, model
from programs import make_blocks, measured_and_predicted, points
from test_budgets import SAMPLES, blocks
from torch import nn

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.errors import Problem
from runner.plan.make import make_plan
from runner.plan.rules.tables import plan_problems
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.schedule import build

WORDS = ("schedule.microbatches=8", "model=mlp", "device=cpu", "parallelism.pipeline=4", "partition=uniform")
REALTIME = "offload=activations_realtime"
SCALARS = 80  # bytes of losses, totals and numbers of an update, at most


@pytest.fixture(autouse=True)
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of other layouts, with which a plan is compared, take most of the time."""
    monkeypatch.setattr("runner.plan.make.misfit", lambda *_, **__: Problem("memory_limit", 0, "is exceeded"))
    monkeypatch.setattr("runner.plan.make.compare_without_pipeline", lambda *_, **__: None)


def planned(profile: ModelProfile, *words: str) -> RunPlan:
    return make_plan(resolve([*WORDS, *words]), profile)


@cache
def even() -> ModelProfile:
    return model([layer(saved_bytes=9000, output_bytes=1000)] * 8)


def test_ranks_lend_only_what_their_limit_asks_for() -> None:
    words = ("schedule=1f1b", "data.batch_size=8", "hardware.link_bytes_per_second=100000")
    plain = planned(even(), *words)
    most = max(plain.peak_memory_bytes)
    roomy = planned(even(), *words, REALTIME, f"memory_limit={most}")
    assert roomy.schedule == plain.schedule
    plan = planned(even(), *words, REALTIME, f"memory_limit={round(0.9 * most)}")
    assert plan.fits
    assert {(move.stage, move.peer) for move in plan.schedule.moves} == {(0, 3)}
    assert 0 < len(plan.schedule.moves) < 8
    assert plan.schedule.compute == plain.schedule.compute
    assert plan.time.step_seconds > plain.time.step_seconds
    peaks, before = plan.peak_memory_bytes, plain.peak_memory_bytes
    assert peaks[0] < before[0]
    assert peaks[3] > before[3]
    (told,) = [line for line in plan.advice if line.startswith("1f1b sends ")]
    assert "between ranks 0 and 3, of 3 micro-batches there and back" in told


def test_no_host_is_filled_above_its_limit() -> None:
    plain = planned(even(), "schedule=1f1b", "data.batch_size=8")
    for share in (0.85, 0.7):
        limit = round(share * max(plain.peak_memory_bytes))
        plan = planned(even(), "schedule=1f1b", "data.batch_size=8", REALTIME, f"memory_limit={limit}")
        hosts = {move.peer for move in plan.schedule.moves}
        assert all(plan.peak_memory_bytes[host] <= limit for host in hosts if host is not None)
        assert plan.fits == (max(plan.peak_memory_bytes) <= limit)


def test_what_is_measured_keeps_to_the_limit() -> None:
    words = [*WORDS[1:], "schedule.microbatches=4", "schedule=gpipe", f"data.batch_size={SAMPLES}"]
    plain = make_plan(resolve(words), blocks())
    limit = round(0.95 * max(plain.peak_memory_bytes))
    plan = make_plan(resolve([*words, REALTIME, f"memory_limit={limit}"]), blocks())
    assert plan.fits
    assert plan.schedule.moves
    found, told = measured_and_predicted(
        make_blocks, nn.functional.mse_loss, points(SAMPLES), plan.activations.stages, plan.schedule, 4
    )
    assert max(found) <= limit
    assert all(0 <= peak - each <= SCALARS for peak, each in zip(plan.memory.peak_bytes, told, strict=True))
    assert all(0.99 * each <= real <= each + SCALARS for real, each in zip(found, told, strict=True))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["schedule=zb_h1"], "a backward in two parts"),
        (["schedule=bpipe"], "lends activations by itself"),
        (["schedule=interleaved_1f1b"], "chosen for one stage"),
        (["schedule=1f1b", "schedule.post_validation=true"], "could not be taken back"),
        (["schedule=1f1b", "optimizer=kfac"], "keeps inputs of layers"),
        (["schedule=1f1b", "zero.stage=1"], "DeepSpeed runs the forward itself"),
    ],
)
def test_what_cannot_lend_is_refused(words: list[str], why: str) -> None:
    problems = plan_problems(resolve([*WORDS, *words, REALTIME]), 8)
    assert any(why in problem.line() for problem in problems)


def test_an_activation_policy_beside_it_is_refused() -> None:
    (problem,) = rules(resolve([*WORDS, REALTIME, "activation_checkpoint=full"]))
    assert problem.line().startswith("offload.activations = realtime: must not meet")


def test_a_schedule_that_lends_already_is_kept() -> None:
    """As a rank's plan of a schedule that the plan of the command chose."""
    words = ("schedule=1f1b", "data.batch_size=8", REALTIME, "memory_limit=1GB")
    lent = build("bpipe", ranks=4, microbatches=8)
    assert make_plan(resolve([*WORDS, *words]), even(), schedule=lent).schedule == lent
