"""Which actions a rank has in which step: values, without processes."""

from __future__ import annotations

import pytest
from narrow import present

from runner.engine.rank_view import RankView
from runner.engine.stream import RankStream
from runner.plan.layout.topology import Topology
from runner.schedule.catalogue.registry import build
from runner.schedule.generators.one_directional.forward_only import forward_only
from runner.schedule.lowering.program import lower
from runner.schedule.values import Op

MICROBATCHES = 4


def stream(name: str, rank: int, ranks: int = 2) -> RankStream:
    order = build(name, ranks=ranks, microbatches=MICROBATCHES)
    view = RankView.of(Topology.grid(ranks, 1, placement=order.rows), rank, microbatches=MICROBATCHES)
    return RankStream(view, lower(order), lower(forward_only(order, MICROBATCHES)), MICROBATCHES)


@pytest.mark.parametrize("name", ["1f1b", "pipefisher"])
def test_a_steps_actions_are_counted_from_its_own_first_microbatch(name: str) -> None:
    one = stream(name, rank=0)
    for step in range(2 * one.interval):
        window = [action for action in one.training(step) if action.op is not Op.FILL]
        numbers = {action.microbatch for action in window if action.op is Op.F}
        assert numbers == set(range(MICROBATCHES))
        last = max(present(action.microbatch) for action in window if action.op is Op.F)
        (there,) = {
            one.in_program(action, step).microbatch
            for action in window
            if action.op is Op.F and action.microbatch == last
        }
        assert there == (step % one.interval) * MICROBATCHES + last
    assert one.training(one.interval) is one.training(0)


def test_without_update_nothing_changes_a_weight() -> None:
    one = stream("pipefisher", rank=1)
    ops = {action.op for action in one.without_update()}
    assert Op.B in ops
    assert not ops & {Op.STEP, Op.REDUCE, Op.FILL}
    assert {Op.STEP} < {action.op for action in one.training(0)}


def test_the_loss_belongs_to_the_rank_that_ends_the_micro_batch() -> None:
    assert stream("1f1b", rank=0).own_losses(True) == []
    assert stream("1f1b", rank=1).own_losses(True) == [0, 1, 2, 3]
    assert stream("gems", rank=0).own_losses(True) == [1, 3]  # every other one goes up
    assert stream("gems", rank=1).own_losses(True) == [0, 2]
