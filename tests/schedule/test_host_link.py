"""The link to the host's memory in the clock: by hand, and within bounds that hold for any order of the moves."""

from __future__ import annotations

import random

import pytest

from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import StageCosts, simulate
from runner.schedule.simulation.host_link import StageMoves, shares
from runner.schedule.values import Op

HALVES = (0.5, 0.5)


def moves(copying: tuple[float, ...], sizes: tuple[float, ...] = (10, 10)) -> StageMoves:
    equal = (1 / len(sizes),) * len(sizes)
    return StageMoves(equal, equal, sizes, copying)


def played(stage: StageMoves, *, backward: float = 2.0, microbatches: int = 1) -> tuple[float, float]:
    """End of the last backward, and the time of waiting for the host; a forward takes 2."""
    program = lower(build("1f1b", ranks=1, microbatches=microbatches))
    found = simulate(program, StageCosts(F=(2.0,), B=(backward,), moves=(stage,)))
    return found.last({Op.B}), found.waiting_for_host[0]


def test_a_link_that_takes_no_time_changes_nothing() -> None:
    assert played(moves((0.0, 0.0))) == (4.0, 0.0)


def test_a_stage_that_moves_nothing_never_waits() -> None:
    assert played(moves((0.0, 0.0), (0, 0))) == (4.0, 0.0)


def test_copies_run_while_later_layers_compute() -> None:
    """Out: 1 to 1.5 and 2 to 2.5. Back: the last layer from 2.5 to 3, the other one when that is used, from 3 to 3.5.

    The backward waits from 2 to 3, runs one layer until 4 and then the other until 5.
    """
    assert played(moves((0.5, 0.5))) == pytest.approx((5.0, 1.0))


def test_a_layer_waits_until_an_earlier_one_has_left() -> None:
    """Out: 1 to 4, for which the second layer waits at 2, and 4 to 7. Back: 7 to 10, and 10 to 13 (used at 10)."""
    assert played(moves((3.0, 3.0))) == pytest.approx((14.0, 10.0))


def test_small_layers_leave_and_come_back_without_waiting_for_each_other() -> None:
    """Of sizes 10, 2, 2, two small ones and no large one fit beside each other; forwards take 2/3 each."""
    third = 2 / 3
    found = StageMoves((1 / 3,) * 3, (1 / 3,) * 3, (10, 2, 2), (1.0, 1.0, 1.0))
    # Out: third .. third + 1 = 5/3. The second layer gives at 4/3 and waits until 5/3, then leaves until 8/3; the third
    # gives at 7/3 and leaves until 11/3. Back: the third until 14/3; the second, asked for with it, until 17/3; both
    # are used, and the first, asked for when the second is, comes from 17/3 to 20/3, used at 20/3.
    waited = 20 / 3 - (7 / 3 + 2 * third) + (7 / 3 - 2)
    assert played(found) == pytest.approx((20 / 3 + third, waited))


def test_a_layer_waits_for_what_it_reads_of_an_earlier_layers_tensors() -> None:
    """As before, but the third layer reads what was moved with the first, which is not asked for ahead.

    Out as before, until 11/3. Back: the third until 14/3, the second until 17/3, and the first, asked for at 14/3,
    until 20/3. The third layer runs then, and the others find all that they need.
    """
    needs = ((0,), (0,), (0, 2))
    found = StageMoves((1 / 3,) * 3, (1 / 3,) * 3, (10, 2, 2), (1.0, 1.0, 1.0), needs=needs)
    assert played(found) == pytest.approx((20 / 3 + 2.0, (20 / 3 - 7 / 3) + 1 / 3))


def test_shares_of_a_stage_without_seconds_are_equal() -> None:
    assert shares([0.0, 0.0]) == HALVES
    assert shares([1.0, 3.0]) == (0.25, 0.75)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b"])
@pytest.mark.parametrize("seed", range(2))
def test_a_step_is_between_compute_alone_and_compute_and_copies_in_turn(name: str, seed: int) -> None:
    chance = random.Random(seed)
    program = lower(build(name, ranks=2, microbatches=4))
    stages = program.schedule.stages

    def each(most: float) -> list[float]:
        return [chance.uniform(0.1, most) for _ in range(stages)]

    plain = StageCosts(F=each(1.0), B=each(2.0), I=each(1.0), W=each(1.0))
    own = [
        StageMoves(
            shares([chance.random() for _ in range(5)]),
            shares([chance.random() for _ in range(5)]),
            tuple(chance.choice((0, 1, 4)) for _ in range(5)),
            tuple(chance.random() / 4 for _ in range(5)),
        )
        for _ in range(stages)
    ]
    alone = simulate(program, plain).makespan
    costs = StageCosts(plain.F, plain.B, plain.I, plain.W, moves=own)
    found = simulate(program, costs)
    copies = 4 * 2 * sum(sum(stage.copying) for stage in own)
    assert alone <= found.makespan <= alone + copies + 1e-9
    fast = [StageMoves(stage.forward, stage.backward, stage.sizes, (0.0,) * 5) for stage in own]
    assert simulate(program, StageCosts(plain.F, plain.B, plain.I, plain.W, moves=fast)).makespan == pytest.approx(
        alone
    )
