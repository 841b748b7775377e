"""Schedules of one direction: published grids, closed forms, sizes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from orders import assert_figures

from runner.schedule import (
    SPECS,
    Costs,
    Op,
    Schedule,
    build,
    check,
    check_program,
    dependencies,
    forward_only,
    lower,
    problems_of,
    simulate,
)
from runner.schedule.kinds import Formulas, ScheduleSpec
from runner.schedule.render import to_text

GRIDS = {
    ("naive", 1, None): """
r0   |0.........aa
r1   |.0......aa..
r2   |..0...aa....
r3   |...0aa......
""",
    ("gpipe", 4, None): """
r0   |0123.........aabbccdd
r1   |.0123......aabbccdd..
r2   |..0123...aabbccdd....
r3   |...0123aabbccdd......
""",
    ("1f1b", 8, None): """
r0   |0123......aa4bb5cc6dd7ee.ff.gg.hh
r1   |.012....aa3bb4cc5dd6ee7ff.gg.hh..
r2   |..01..aa2bb3cc4dd5ee6ff7gg.hh....
r3   |...0aa1bb2cc3dd4ee5ff6gg7hh......
""",
    ("1f1b_eager", 8, None): """
r0   |0123456...aa7bb.cc.dd.ee.ff.gg.hh
r1   |.01234..aa5bb6cc7dd.ee.ff.gg.hh..
r2   |..012.aa3bb4cc5dd6ee7ff.gg.hh....
r3   |...0aa1bb2cc3dd4ee5ff6gg7hh......
""",
    ("interleaved_1f1b", 8, None): """
r0.0 |0123    456...  7  .       aa bbcc.dd.  .  .  .  eeffgghh
r0.1 |    0123   ...aa bb.4cc5dd6  7    .  .ee.ff.gg.hh
r1.0 |.0123    4..  5  6  7   aa bb cc dd.  .  .  .  eeffgghh..
r1.1 |.    0123 ..aa bb cc dd4  5  6  7  .ee.ff.gg.hh        ..
r2.0 |..0123   .     4  5  6aa7bb cc dd      .  .  eeffgghh....
r2.1 |..    012.aa3bb cc dd      4  5  6ee7ff.gg.hh        ....
r3.0 |...0123            4aa5bb6cc7dd            eeffgghh......
r3.1 |...    0aa1bb2cc3dd            4ee5ff6gg7hh        ......
""",
    ("looped_bfs", 4, None): """
r0.0 |0123    .........        ddccbbaa
r0.1 |    0123.........ddccbbaa
r1.0 |.0123    ......        ddccbbaa..
r1.1 |.    0123......ddccbbaa        ..
r2.0 |..0123    ...        ddccbbaa....
r2.1 |..    0123...ddccbbaa        ....
r3.0 |...0123            ddccbbaa......
r3.1 |...    0123ddccbbaa        ......
""",
    ("zb_h1", 8, None): """
r0   |0123...aA4bB5cC6dD7eEfFgGhH
r1   |.012..a3bA4cB5dC6eD7fEgFhGH
r2   |..01.a2b3cA4dB5eC6fD7gEhFGH
r3   |...0a1b2c3dA4eB5fC6gD7hEFGH
""",
    ("zb_h2", 8, None): """
r0   |0123456aA7bBcCdDeEfFgGhH...
r1   |.01234a5b6cA7dBeCfDgEhFGH..
r2   |..012a3b4c5d6eA7fBgChDEFGH.
r3   |...0a1b2c3d4e5f6gA7hBCDEFGH
""",
    ("zb_v", 8, None): """
r0.0 |0123456            7aA   bB   cC   dD   eEfFgGhH...
r0.1 |       0aA1bB2cC3dD   4eE  5fF  6gG  7hH        ...
r1.0 |.01234 5         6aA   7bB   cC   dD   e fEgFhG H..
r1.1 |.     0 1aA2bB3cC   4dD   5eE  6fF  7gG h      H ..
r2.0 |..012 3 4      5aA   6bB   7cC   dD   e f gEhF  GH.
r2.1 |..   0 1 2aA3bB   4cC   5dD   6eE  7fF g h    GH  .
r3.0 |...0 1 2 3   4aA   5bB   6cC   7dD   e f g hE   FGH
r3.1 |... 0 1 2 3aA   4bB   5cC   6dD   7eE f g h  FGH
""",
    ("v_half", 8, None): """
r0.0 |01..... 2   3  . 4.a A  5b B  6c C  7d D  .e E  f F .gG...hH
r0.1 |  .....0 aA1 bB.2 . c 3C  d 4D  e 5E  f 6F. g 7G h H.  ...
r1.0 |.01... ..2   3.   aA4   bB5   cC6   dD7   eE   fF.  gG...hH.
r1.1 |.  ...0.. 1aA .2bB   3cC   4dD   5eE   6fF  7gG  .hH  ...  .
r2.0 |..0.. 1.. 2.   3a A  4b B  5c C  6d D  7e E  .f F .g G .hH..
r2.1 |.. ..0 ..1 .aA2  b 3B  c 4C  d 5D  e 6E  f 7F. g G. h H.  ..
r3.0 |...0 ..1 ..2   aA3   bB4   cC5   dD6   eE7   fF.  gG.  hH...
r3.1 |... 0.. 1.. 2aA   3bB   4cC   5dD   6eE   7fF  .gG  .hH  ...
""",
    ("v_min", 8, None): """
r0.0 |01.....   2..  a A3  b B4  c C5  d D6  e E7  f F.  g G...hH
r0.1 |  .....0aA ..1b B  2c C  3d D  4e E  5f F  6g G .7h H ...
r1.0 |.0.... 1.  . 2a A  3b B  4c C  5d D  6e E  7f F  .g G ..hH.
r1.1 |. ....0 .aA.1  b B2  c C3  d D4  e E5  f F6  g G7. h H..  .
r2.0 |..0.. ..1.   a2A   b3B   c4C   d5D   e6E   f7F   gG.  .hH..
r2.1 |.. ..0.. .a1A   b2B   c3C   d4D   e5E   f6F   g7G  .hH.  ..
r3.0 |...0 ....1  a A2  b B3  c C4  d D5  e E6  f F7  g G.. h H..
r3.1 |... 0.... 1a A  2b B  3c C  4d D  5e E  6f F  7g G ..h H ..
""",
    ("dualpipe_v", 8, None): """
r0.0 |0123456          7   aa   .bb   .cc   .dd  eEfFgGhH
r0.1 |       0aA1bB2cC3 dd4  ee5.  ff6.  gg7.  hh
r1.0 |.01234 5       6   aa7   bb   .cc   .dd  ee f gFhGH
r1.1 |.     0 1aA2bB3 cc4   dd5  ee6.  ff7.  gg  h H
r2.0 |..012 3 4    5   aa6   bb7   cc   .dd  ee  f gFh GH
r2.1 |..   0 1 2aA3 bb4   cc5   dd6  ee7.  ff  gg h   H
r3.0 |...0 1 2 3 4   aa5   bb6   cc7   dd  ee  ff g h G H
r3.1 |... 0 1 2 3 aa4   bb5   cc6   dd7  ee  ff  g h G H
""",
    ("hanayo", 4, 2): """
r0.0 |0123...            ....aa.bb..cc..dd
r0.1 |    ...0aa1bb2cc3dd....  .  ..  ..
r1.0 |.0123. . .        .  aa.bb..cc..dd..
r1.1 |.    .0.1.aa2bb3cc.dd  .  ..  ..  ..
r2.0 |..012 3 . .   .  .aa  bb  cc..dd....
r2.1 |..   0 1.2.3aa.bb.  cc  dd  ..  ....
r3.0 |...0 1 2 3 ...  aa  bb  cc  dd......
r3.1 |... 0 1 2 3...aa  bb  cc  dd  ......
""",
    ("varuna", 4, None): """
r0   |0123~.....aa~bb~cc~...dd
r1   |.0123~..aa~bb~cc~...dd..
r2   |..012~aa~bb~cc3~..dd....
r3   |...0aa1bb2cc...3dd......
""",
}
ALL = [spec for spec in SPECS.values() if spec.name not in ("from_file", "auto")]
NEW = [spec for spec in ALL if not spec.one_rank]


@pytest.mark.parametrize(("name", "microbatches", "chunks"), GRIDS)
def test_grid(name: str, microbatches: int, chunks: int | None) -> None:
    """The pictures that the sources print, for four ranks."""
    schedule = build(name, ranks=4, microbatches=microbatches, chunks=chunks)
    rows = GRIDS[name, microbatches, chunks].strip().splitlines()
    drawn = to_text(schedule, Costs()).splitlines()[: len(rows)]
    assert [row.rstrip() for row in drawn] == rows


@pytest.mark.parametrize(
    ("name", "chunks", "span", "idle", "inner", "peaks"),
    [
        ("naive", None, 96, 0.750, 72, (1, 1, 1, 1)),
        ("gpipe", None, 33, 0.273, 9, (8, 8, 8, 8)),
        ("1f1b", None, 33, 0.273, 9, (4, 3, 2, 1)),
        ("1f1b_eager", None, 33, 0.273, 9, (7, 5, 3, 1)),
        ("bpipe", None, 33, 0.273, 9, (3, 3, 2, 2)),
        ("interleaved_1f1b", 2, 28.5, 0.158, 4.5, (5.5, 4.5, 3.5, 2.5)),
        ("looped_bfs", 2, 28.5, 0.158, 4.5, (8, 8, 8, 8)),
        ("hanayo", 2, 32.5, 0.262, 8.5, (4, 4.5, 5, 5.5)),
        ("hanayo", 4, 30.5, 0.213, 6.5, (4.5, 4.25, 4.5, 4.75)),
        ("zb_h1", None, 27, 0.111, 3, (4, 4, 4, 4)),
        ("zb_h2", None, 27, 0.111, 0, (7, 7, 7, 7)),
        ("zb_v", None, 25.5, 0.059, 0, (4, 4, 4, 4)),
        ("v_half", None, 30, 0.200, 6, (3, 3, 3, 3)),
        ("v_min", None, 29.5, 0.186, 5.5, (2, 2, 2, 2)),
        ("dualpipe_v", None, 25.5, 0.059, 1.5, (4.5, 4.5, 4.5, 4.5)),
    ],
)
def test_four_ranks_eight_microbatches(
    name: str, chunks: int | None, span: float, idle: float, inner: float, peaks: tuple[float, ...]
) -> None:
    assert_figures(build(name, ranks=4, microbatches=8, chunks=chunks), span, idle, inner, peaks)


@pytest.mark.parametrize(
    ("ranks", "chunks", "idle"),
    [(4, 2, 0.333), (4, 4, 0.213), (4, 8, 0.119), (8, 2, 0.368), (8, 4, 0.238), (8, 8, 0.135)],
)
def test_more_waves_leave_less_idle(ranks: int, chunks: int, idle: float) -> None:
    found = simulate(build("hanayo", ranks=ranks, microbatches=ranks, chunks=chunks), Costs())
    assert found.bubble_ratio == pytest.approx(idle, abs=5e-4)


def _closed(formula: str, schedule: Schedule, costs: Costs, rank: int = 0) -> float:
    values: dict[str, float] = {"D": schedule.ranks, "T": schedule.microbatches, "v": schedule.chunks, "r": rank}
    durations = {"F": costs.F, "B": costs.B, "I": costs.I, "W": costs.W}
    return float(eval(formula, {"min": min, "max": max}, values | durations))


def _follows(formulas: Formulas, schedule: Schedule, costs: Costs) -> None:
    if not _closed(formulas.when, schedule, costs):
        return
    found = simulate(schedule, costs)
    where = (schedule.ranks, schedule.microbatches, schedule.chunks, costs)
    assert found.makespan == pytest.approx(_closed(formulas.span, schedule, costs)), where
    assert found.bubble_ratio == pytest.approx(_closed(formulas.bubble_ratio, schedule, costs)), where
    if schedule.ranks == 1:
        return
    peaks = [_closed(formulas.peak_activations, schedule, costs, rank) for rank in range(schedule.ranks)]
    assert found.peak_activations == pytest.approx(peaks), where
    assert max(found.inner_idle) == pytest.approx(_closed(formulas.inner_idle, schedule, costs)), where


def _runs(schedule: Schedule) -> None:
    where = (schedule.name, schedule.ranks, schedule.microbatches, schedule.chunks)
    assert check(schedule) == [], where
    assert check_program(lower(schedule)) == [], where


DURATIONS = [Costs(), Costs(F=3, B=5, I=3, W=2), Costs(F=2, B=5, I=3, W=2), Costs(F=2, B=3, I=1, W=2)]


def _legal(spec: ScheduleSpec, ranks: int, chunks: int, microbatches: int) -> bool:
    legal = spec.ranks.holds(ranks, ranks) and spec.chunks.holds(ranks, chunks)
    return legal and spec.microbatches.holds(ranks, microbatches)


@pytest.mark.costly
@pytest.mark.parametrize("most", [7, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_sizes(spec: ScheduleSpec, most: int) -> None:
    """Valid, also where messages block; time, idleness and activations as the closed forms say.

    The smallest size, and a seeded sample of those up to six ranks and four micro-batches for each of them.
    """
    all_sizes = itertools.product(range(1 if spec.one_rank else 2, 7), range(1, 5), range(1, 25))
    sizes = [size for size in all_sizes if size[2] <= 4 * size[0] and _legal(spec, *size)]
    sizes = [(r, c, m) for r, c, m in sizes if not problems_of(spec.name, ranks=r, microbatches=m, chunks=c)]
    for ranks, chunks, microbatches in [sizes[0], *random.Random(spec.name).sample(sizes, min(most, len(sizes)))]:
        schedule = build(spec.name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        _runs(schedule)
        if spec.formulas is not None:
            for costs in DURATIONS:
                _follows(spec.formulas, schedule, costs)


@pytest.mark.parametrize("spec", NEW, ids=lambda spec: spec.name)
def test_what_is_refused_names_what_is_not(spec: ScheduleSpec) -> None:
    for ranks, microbatches, chunks in itertools.product((2, 3, 4, 7), (1, 2, 3, 5, 7, 8, 12, 28, 33), range(1, 5)):
        problems = problems_of(spec.name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        assert (problems == []) is _legal(spec, ranks, chunks, microbatches)
        for problem in problems:
            fixed: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
            path, value = problem.fix.split("=")
            fixed["ranks" if path == "parallelism.pipeline" else path.removeprefix("schedule.")] = int(value)
            assert problem.path not in {each.path for each in problems_of(spec.name, **fixed)}


def test_the_turn_of_a_v_needs_no_message() -> None:
    program = lower(build("zb_v", ranks=3, microbatches=6))
    sends = [action for row in program.actions for action in row if action.op is Op.SEND]
    assert len(sends) == 2 * 4 * 6  # of five edges the middle one stays on its rank
    assert {(action.stage, str(action.payload)) for action in sends}.isdisjoint({(2, "F"), (3, "B")})


def test_recomputation_waits_for_its_forward_and_the_backward_for_it() -> None:
    schedule = build("varuna", ranks=3, microbatches=2)
    recomputed = [action for row in schedule.actions for action in row if action.op is Op.R]
    assert {action.stage for action in recomputed} == {0, 1}
    for action in recomputed:
        assert dependencies(schedule, action) == (action._replace(op=Op.F),)
        assert action in dependencies(schedule, action._replace(op=Op.B))
    assert simulate(schedule, Costs()).peak_activations == (1, 1, 1)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("ranks", "costs"),
    [(4, Costs()), (5, Costs(F=2, B=5, I=3, W=2, comm=0.5)), (2, Costs(F=1, B=4, I=1, W=3)), (4, Costs(W=0, B=1))],
)
def test_list_scheduling_keeps_its_limit_and_is_no_worse(ranks: int, costs: Costs) -> None:
    """Never longer than the hand-written order that keeps as many activations."""
    for microbatches, limit in itertools.product((1, ranks, 4 * ranks), (1, 2, ranks, 2 * ranks - 1, 2 * ranks)):
        asked: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches}
        schedule = build("zb_auto", **asked, memory_limit=limit, costs=costs)
        _runs(schedule)
        found = simulate(schedule, costs)
        assert max(found.peak_activations) <= limit
        if limit >= ranks:
            assert found.makespan <= simulate(build("zb_h1", **asked), costs).makespan
        if limit >= 2 * ranks - 1 and microbatches >= 2 * ranks - 1:
            assert found.makespan <= simulate(build("zb_h2", **asked), costs).makespan


def test_list_scheduling_uses_the_memory_it_is_given() -> None:
    spans = [
        simulate(build("zb_auto", ranks=4, microbatches=16, memory_limit=limit), Costs()).makespan
        for limit in (1, 2, 3, 4)
    ]
    assert spans == sorted(spans, reverse=True)
    assert len(set(spans)) == 4
    wide = simulate(build("zb_auto", ranks=4, microbatches=16, memory_limit=7), Costs())
    assert max(wide.inner_idle) == 0


def test_a_limit_defaults_to_the_ranks() -> None:
    assert build("zb_auto", ranks=3, microbatches=8) == build("zb_auto", ranks=3, microbatches=8, memory_limit=3)


def test_every_schedule_has_its_formulas_or_none() -> None:
    """An asynchronous schedule has no step of its own, of which a formula could be."""
    without = {name for name, spec in SPECS.items() if spec.formulas is None and spec.kind == "synchronous"}
    known = {"zb_auto", "auto", "hanayo", "varuna", "pipefb", "pipefisher", "from_file"}
    assert without == known, "give a new schedule its closed forms, or name it here"


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
