"""Ranks that lend what they save of some micro-batches: the same bits as without, and the predicted peaks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from layouts import train_in_threads, uniform
from programs import make_blocks, measured_and_predicted, points
from torch import nn

from runner.memory.solve.values import ChainProgram, Segment
from runner.schedule import build
from runner.schedule.checking.schedule import check
from runner.schedule.lending import FEWEST, Loan, with_loans
from runner.schedule.values import Op, Schedule

COUNT, SAMPLES = 8, 128
SCALARS = 64  # bytes of losses and headers, which predictions of tensors do not count
LOANS = {
    "first": [Loan(0, 3, 2)],
    "second": [Loan(1, 3, 2)],
    "two_hosts": [Loan(0, 2, 3), Loan(1, 3, 2)],
    "one_host": [Loan(0, 3, 3), Loan(1, 3, 2)],
}


def lending(loans: list[Loan], name: str = "1f1b") -> Schedule:
    return with_loans(build(name, ranks=4, microbatches=COUNT), loans)


def kept(first: int, last: int) -> ChainProgram:
    return tuple(Segment(at, at) for at in range(first, last + 1))


def again(first: int, last: int) -> ChainProgram:
    return tuple(Segment(at, at, recompute=at > first) for at in range(first, last + 1))


@pytest.mark.costly
@pytest.mark.parametrize(("program", "name"), [(kept, "two_hosts"), (again, "one_host")])
def test_peaks_of_lenders_and_of_hosts_are_those_predicted(name: str, program: object) -> None:
    """Also in backwards: what has come back is dropped there as soon as it is used."""
    make, loans = kept if program is kept else again, LOANS[name]
    programs = tuple(make(*each) for each in uniform(10, 4))
    found, told = measured_and_predicted(
        make_blocks, nn.functional.mse_loss, points(SAMPLES), programs, lending(loans), COUNT
    )
    plain, _ = measured_and_predicted(make_blocks, nn.functional.mse_loss, points(SAMPLES), programs, "1f1b", COUNT)
    assert all(real <= said + SCALARS for real, said in zip(found, told, strict=True))
    assert all(said <= 1.01 * real for real, said in zip(found, told, strict=True))
    for loan in loans:
        assert found[loan.lender] < plain[loan.lender]
        assert found[loan.host] > plain[loan.host]


@pytest.mark.parametrize(("loans", "name"), [("two_hosts", "gpipe"), ("one_host", "1f1b")])
def test_bits_are_those_of_a_run_that_lends_nothing(loans: str, name: str) -> None:
    batches = [points(2 * COUNT)] * 2
    sgd = partial(torch.optim.SGD, lr=0.1)
    make = partial(make_blocks, dropout=0.2)
    results = [
        train_in_threads(
            make, nn.functional.mse_loss, batches, schedule=order, pipeline=4, data=1, count=COUNT, optimizer=sgd
        )
        for order in (name, lending(LOANS[loans], name))
    ]
    (losses, weights), (lent_losses, lent_weights) = results
    assert lent_losses == losses
    assert [key for key, value in weights.items() if not torch.equal(lent_weights[key], value)] == []


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 7), ("gpipe", 4)])
def test_a_lender_keeps_at_most_what_its_loan_says(name: str, ranks: int) -> None:
    plain = build(name, ranks=ranks, microbatches=COUNT)
    for most in range(FEWEST, ranks):
        schedule = with_loans(plain, [Loan(0, ranks - 1, most)])
        assert check(schedule) == []
        kept, largest = 0, 0
        for action in schedule.actions[0]:
            kept += (action.op in (Op.F, Op.IN)) - (action.op in (Op.B, Op.OUT))
            largest = max(largest, kept)
        assert largest == min(most, ranks if name == "1f1b" else COUNT)
        assert schedule.compute == plain.compute
