"""``mpress`` may lend a rank's micro-batches to a rank with room, where that is faster than moves to the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch
from plan_profiles import layer, model
from programs import make_blocks, points, train_under
from test_budgets import SAMPLES, blocks
from torch import nn

from runner.config.compose.resolve import resolve
from runner.errors import Problem
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.schedule import build
from runner.schedule.lending import FEWEST, Loan, with_loans

SLOW_HOST = ("hardware.link_bytes_per_second=1e9", "hardware.host_link_bytes_per_second=1e3")
WORDS = ("model=mlp", "device=cpu", "parallelism.pipeline=4", "partition=uniform", "offload=activations_mpress")
MICROBATCHES = 6
SCALARS = 80  # bytes of losses, totals and numbers of an update, at most


@pytest.fixture(autouse=True)
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of other layouts, with which a plan is compared, take most of the time."""
    monkeypatch.setattr("runner.plan.make.misfit", lambda *_, **__: Problem("memory_limit", 0, "is exceeded"))
    monkeypatch.setattr("runner.plan.make.compare_without_pipeline", lambda *_, **__: None)


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


def test_the_choice_is_the_fastest_of_all_sets_of_loans() -> None:
    limit = round(0.9 * max(planned(10**9, *SLOW_HOST).peak_memory_bytes))
    plan = planned(limit, *SLOW_HOST)
    assert plan.fits
    others = [planned(limit, *SLOW_HOST, loans=loans) for loans in every_loan() if loans]
    best = min((each.time.step_seconds for each in others if each.fits), default=float("inf"))
    assert len(others) >= 3
    assert plan.time.step_seconds <= best * (1 + 1e-6)
    assert plan.schedule.moves


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


def test_what_is_measured_keeps_to_the_limit_with_the_same_bits() -> None:
    """A plan of real layers in which a rank lends."""
    words = [*WORDS, "schedule.microbatches=4", f"data.batch_size={SAMPLES}", *SLOW_HOST]
    kept = make_plan(resolve(words), blocks())
    limit = round(0.95 * max(kept.peak_memory_bytes))
    plan = make_plan(resolve([*words, f"memory_limit={limit}"]), blocks())
    assert plan.fits
    assert plan.schedule.moves
    plain, lent = (
        train_under(make_blocks, nn.functional.mse_loss, points(SAMPLES), each.activations.stages, each.schedule, 4)
        for each in (kept, plan)
    )
    assert lent.losses == plain.losses
    assert [name for name in plain.weights if not torch.equal(plain.weights[name], lent.weights[name])] == []
    assert max(lent.peaks) <= limit
    assert all(0 <= peak - each <= SCALARS for peak, each in zip(plan.memory.peak_bytes, lent.predicted, strict=True))
    assert all(0.99 * each <= real <= each + SCALARS for real, each in zip(lent.peaks, lent.predicted, strict=True))
