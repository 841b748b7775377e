"""``mpress`` may lend a rank's micro-batches to a rank with room, where that is faster than moves to the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from covering import sampled
from layouts import train_in_threads
from plan_profiles import layer, model
from programs import make_blocks, measured_and_predicted, points
from test_budgets import SAMPLES, blocks
from torch import nn

from runner.config.compose.resolve import resolve
from runner.errors import Problem
from runner.memory.apply.install import install
from runner.model.layers import StageModule
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.schedule import build
from runner.schedule.lending import FEWEST, Loan, with_loans

SLOW_HOST = ("hardware.link_bytes_per_second=1e9", "hardware.host_link_bytes_per_second=1e3")
WORDS = ("model=mlp", "device=cpu", "parallelism.pipeline=4", "partition=uniform", "offload=activations_mpress")
MICROBATCHES = 6
SCALARS = 64


@pytest.fixture(autouse=True)
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of other layouts, with which a plan is compared, take most of the time."""
    monkeypatch.setattr("runner.plan.make.misfit", lambda *_, **__: Problem("memory_limit", 0, "is exceeded"))
    monkeypatch.setattr("runner.plan.make.compare_without_pipeline", lambda *_: None)


@cache
def even() -> ModelProfile:
    return model([layer(saved_bytes=9000, output_bytes=1000)] * 8)


def planned(limit: int, *words: str, loans: tuple[Loan, ...] = ()) -> RunPlan:
    config = resolve([
        *WORDS, f"schedule.microbatches={MICROBATCHES}", f"data.batch_size={MICROBATCHES}", f"memory_limit={limit}",
        *words,
    ])  # fmt: skip
    order = with_loans(build("1f1b", ranks=4, microbatches=MICROBATCHES), loans)
    return make_plan(config, even(), schedule=order if loans else None)


def every_loan() -> Iterator[tuple[Loan, ...]]:
    """All sets of loans, of which none is to a lender."""
    of_rank = [
        [None, *(Loan(lender, host, most) for host in range(4) if abs(host - lender) > 1 for most in range(FEWEST, 4))]
        for lender in range(4)
    ]
    for some in product(*of_rank):
        loans = tuple(loan for loan in some if loan is not None)
        kept = [4 - rank for rank in range(4)]  # micro-batches of 1f1b
        apart = not {loan.host for loan in loans} & {loan.lender for loan in loans}
        if apart and all(loan.most < kept[loan.lender] for loan in loans):
            yield loans


@pytest.mark.parametrize("share", sampled([0.9, 0.8, 0.7, 0.5], 0.9, 0.5))
def test_the_choice_is_the_fastest_of_all_sets_of_loans(share: float) -> None:
    limit = round(share * max(planned(10**9, *SLOW_HOST).peak_memory_bytes))
    plan = planned(limit, *SLOW_HOST)
    assert plan.fits
    others = [planned(limit, *SLOW_HOST, loans=loans) for loans in every_loan() if loans]
    best = min((each.time.step_seconds for each in others if each.fits), default=float("inf"))
    assert len(others) >= 3
    assert plan.time.step_seconds <= best * (1 + 1e-6)
    assert bool(plan.schedule.moves) == (share > 0.7)


def test_a_lender_keeps_everything_and_the_others_do_what_they_need() -> None:
    limit = round(0.8 * max(planned(10**9, *SLOW_HOST).peak_memory_bytes))
    plan = planned(limit, *SLOW_HOST)
    assert {(move.stage, move.peer) for move in plan.schedule.moves} == {(0, 3)}
    names = [choice.chosen.name for choice in plan.activations.choices]
    assert names[:2] == ["lending to rank 3", "mpress of 0 moved and 1 again"]
    assert any("mpress lends micro-batches of rank 0 to rank 3" in reason for reason in plan.reasons)
    again = planned(limit, *SLOW_HOST, loans=(Loan(0, 3, 3),))
    assert (again.activations.stages, again.schedule) == (plan.activations.stages, plan.schedule)


@pytest.mark.parametrize("words", [("schedule=zb_h1",), ("zero.stage=1", "parallelism.data=2"), SLOW_HOST[:0]])
def test_without_need_or_where_ranks_cannot_lend_nothing_is_lent(words: tuple[str, ...]) -> None:
    limit = 10**9 if not words else 60_000
    assert not planned(limit, *SLOW_HOST, *words).schedule.moves


@cache
def measured_plan() -> tuple[RunPlan, int]:
    """A plan of real layers in which a rank lends, and its limit."""
    words = [*WORDS, "schedule.microbatches=4", f"data.batch_size={SAMPLES}", *SLOW_HOST]
    limit = round(0.95 * max(make_plan(resolve(words), blocks()).peak_memory_bytes))
    return make_plan(resolve([*words, f"memory_limit={limit}"]), blocks()), limit


def test_what_is_measured_keeps_to_the_limit() -> None:
    plan, limit = measured_plan()
    assert plan.fits
    assert plan.schedule.moves
    found, told = measured_and_predicted(
        make_blocks, nn.functional.mse_loss, points(SAMPLES), plan.activations.stages, plan.schedule, 4
    )
    assert max(found) <= limit
    assert all(0 <= peak - each <= SCALARS for peak, each in zip(plan.memory.peak_bytes, told, strict=True))
    assert all(0.99 * each <= real <= each + SCALARS for real, each in zip(found, told, strict=True))


def test_losses_and_weights_are_the_same_bits() -> None:
    plan, _ = measured_plan()

    def prepare(stage: StageModule, number: int, programs: bool) -> None:
        if programs:
            install(stage, plan.activations.stages[number])

    def trained(lent: bool) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
        schedule = plan.schedule if lent else replace(plan.schedule, actions=plan.schedule.compute)
        return train_in_threads(
            make_blocks, nn.functional.mse_loss, [points(SAMPLES)] * 2, pipeline=4, data=1, schedule=schedule, count=4,
            optimizer=partial(torch.optim.SGD, lr=0.1), prepare=partial(prepare, programs=lent),
        )  # fmt: skip

    losses, weights = trained(False)
    found, changed = trained(True)
    assert found == losses
    assert [name for name in weights if not torch.equal(weights[name], changed[name])] == []
