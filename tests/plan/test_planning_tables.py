"""What planners know of layers and of the memory of stages, in small numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_profiles import layer, loss_layer
from planning_problems import problem

from runner.plan.planners.cuts import starts
from runner.plan.planners.orders import Orders
from runner.plan.planners.stages import Setting, StageTable
from runner.plan.planners.values import Division, Kept, Line, Order
from runner.plan.planners.ways import merged


@pytest.mark.parametrize("limit", [6, 8, 10])
def test_a_search_starts_from_a_cut_that_fits_where_an_even_one_does_not(limit: int) -> None:
    """Eight layers keep a byte of each micro-batch; with 1f1b the stages hold four, three, two and one of them."""
    ones, nothing = (Line(0.0, 1.0),) * 8, (Line(0.0, 0.0),) * 8
    everything = Kept("none", True, ones, nothing, nothing, ones, ones, nothing)
    division = Division(1, ones, (0.0,) * 8, (0.0,) * 8, (0.0,) * 8, (0.0,) * 8, (everything,))
    of = replace(problem(0, layers=8), divisions=(division,))
    order = Orders().of(Order("1f1b", 1), 4, 8)
    assert order is not None
    table = StageTable(of, Setting(division, 1.0, 8, 1, None))
    made = starts(table, order, limit, [0]).cuts.T.tolist()
    lengths = [[end - first for first, end in zip(cut, cut[1:], strict=False)] for cut in made]
    fitting = [each for each in lengths if all(n * held <= limit for n, held in zip(each, (4, 3, 2, 1), strict=True))]
    assert [2, 2, 2, 2] in lengths
    assert [max(each) for each in fitting] == [2 if limit >= 8 else 3]


@pytest.mark.parametrize("of_loss", [3, 40])
def test_a_loss_runs_behind_the_last_layer_and_its_peak_is_not_added(of_loss: int) -> None:
    last = layer(forward_transient_bytes=5, backward_transient_bytes=12, saved_bytes=30, forward_seconds=1.0)
    loss = loss_layer(
        forward_transient_bytes=of_loss, backward_transient_bytes=of_loss + 1, saved_bytes=2, forward_seconds=0.5
    )
    first, made = merged([layer(), last], loss)
    assert first == layer()
    assert made.forward_transient_bytes == max(5, of_loss)
    assert made.backward_transient_bytes == max(12, of_loss + 1)
    assert (made.saved_bytes, made.forward_seconds) == (32, 1.5)
