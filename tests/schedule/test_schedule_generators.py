"""Grids and closed forms of the classical schedules."""

from __future__ import annotations

from typing import Any

import pytest
from narrow import present
from orders import assert_figures

from runner.schedule import SPECS, Costs, Op, Schedule, build, check, forward_only, simulate
from runner.schedule.render import to_text

GRIDS = {
    ("naive", 1): """
r0   |0.........aa
r1   |.0......aa..
r2   |..0...aa....
r3   |...0aa......
""",
    ("gpipe", 4): """
r0   |0123.........aabbccdd
r1   |.0123......aabbccdd..
r2   |..0123...aabbccdd....
r3   |...0123aabbccdd......
""",
    ("1f1b", 8): """
r0   |0123......aa4bb5cc6dd7ee.ff.gg.hh
r1   |.012....aa3bb4cc5dd6ee7ff.gg.hh..
r2   |..01..aa2bb3cc4dd5ee6ff7gg.hh....
r3   |...0aa1bb2cc3dd4ee5ff6gg7hh......
""",
}

ALL_SIZES = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 4 * ranks + 1)]


@pytest.mark.parametrize(("name", "microbatches"), GRIDS)
def test_grid(name: str, microbatches: int) -> None:
    drawn = to_text(build(name, ranks=4, microbatches=microbatches), Costs()).splitlines()
    assert drawn[:4] == GRIDS[name, microbatches].strip().splitlines()


def _closed(formula: str, **values: Any) -> float:
    return float(eval(formula, {"min": min}, values))


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("costs", [Costs(), Costs(F=3, B=2)], ids=str)
def test_closed_forms(name: str, costs: Costs) -> None:
    formulas = SPECS[name].formulas
    assert formulas is not None
    for ranks, microbatches in ALL_SIZES:
        schedule = build(name, ranks=ranks, microbatches=microbatches)
        found = simulate(schedule, costs)
        values: dict[str, Any] = {"D": ranks, "T": microbatches, "F": costs.F, "B": costs.B}
        assert found.makespan == _closed(formulas.span, **values), (ranks, microbatches)
        assert found.bubble_ratio == pytest.approx(_closed(formulas.bubble_ratio, **values)), (ranks, microbatches)
        if ranks > 1:
            assert max(found.inner_idle) == _closed(formulas.inner_idle, **values), (ranks, microbatches)
            expected = tuple(_closed(formulas.peak_activations, r=rank, **values) for rank in range(ranks))
            assert found.peak_activations == expected, (ranks, microbatches)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_every_size_is_valid(name: str) -> None:
    for ranks, microbatches in ALL_SIZES:
        assert check(build(name, ranks=ranks, microbatches=microbatches)) == [], (ranks, microbatches)


@pytest.mark.parametrize(
    ("name", "span", "idle", "inner", "peaks"),
    [
        ("naive", 96, 0.750, 72, (1, 1, 1, 1)),
        ("gpipe", 33, 0.273, 9, (8, 8, 8, 8)),
        ("1f1b", 33, 0.273, 9, (4, 3, 2, 1)),
    ],
)
def test_four_ranks_eight_microbatches(
    name: str, span: float, idle: float, inner: float, peaks: tuple[int, ...]
) -> None:
    assert_figures(build(name, ranks=4, microbatches=8), span, idle, inner, peaks)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_one_rank_accumulates(name: str) -> None:
    row = build(name, ranks=1, microbatches=3).actions[0]
    assert " ".join(map(str, row)) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_forward_only_keeps_the_placement() -> None:
    schedule = forward_only(3, 4)
    assert check(schedule) == []
    assert all(action.op is Op.F for row in schedule.actions for action in row)
    assert [str(action) for action in schedule.actions[1]] == ["1F0", "1F1", "1F2", "1F3"]
    assert forward_only(build("1f1b", ranks=3, microbatches=9), 4) == schedule
    assert simulate(schedule, Costs()).makespan == 6
    assert simulate(schedule, Costs()).peak_activations == (1, 1, 1)


def test_forward_only_of_several_chunks() -> None:
    looped = Schedule("looped", ((0, 1, 0, 1),), (0,), ((), ()), chunks=2)
    schedule = forward_only(looped, 2)
    assert check(schedule) == []
    assert [str(action) for action in schedule.actions[1]] == ["1F0", "1F1", "3F0", "3F1"]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 4), (3, 8), (4, 8)])
def test_order_is_torchs(ranks: int, microbatches: int) -> None:
    """torch's own description of the order, of the ranks where it describes what it runs.

    For the last rank of 1F1B, torch 2.13 numbers the forwards from 1; so its backwards alone are compared there.
    """
    from torch.distributed.pipelining import schedules

    for name, cls in (("gpipe", schedules.ScheduleGPipe), ("1f1b", schedules.Schedule1F1B)):
        theirs = cls.__new__(cls)
        theirs._num_stages, theirs._n_microbatches = ranks, microbatches
        order = present(theirs._get_pipeline_order())
        for rank, row in enumerate(build(name, ranks=ranks, microbatches=microbatches).actions):
            cells = [str(cell) for cell in order[rank] if cell is not None and "REDUCE_GRAD" not in str(cell)]
            mine = [str(action) for action in row]
            if name == "1f1b" and rank == ranks - 1:
                cells = [cell for cell in cells if "B" in cell]
                mine = [cell for cell in mine if "B" in cell]
            assert mine == cells, (name, rank)
