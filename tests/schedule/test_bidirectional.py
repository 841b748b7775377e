"""Pipelines in both directions: published grids, tables and closed forms; where their stages live and are reduced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from orders import assert_figures

from runner.schedule import (
    Action,
    Costs,
    Op,
    Schedule,
    build,
    check,
    check_program,
    dependencies,
    lower,
    parse_action,
    simulate,
)
from runner.schedule.render import to_csv, to_json, to_text
from runner.schedule.stream import versions_held

GRIDS = {
    ("gems", 4): """
r0d  |0.........aa   1............bb   ......
r0u  | .........  0aa ............  1bb......
r1d  |.0......aa ....  1........bb ....  ....
r1u  |. ......  0....aa ........  1....bb....
r2d  |..0...aa ........  1....bb ........  ..
r2u  |.. ...  0........aa ....  1........bb..
r3d  |...0aa ............  1bb ............
r3u  |...   0............aa   1............bb
""",
    ("chimera", 4): """
r0d  |01.      .aa..bb
r0u  |  .0aa1bb.  ..
r1d  |.0 1 .  aa  bb..
r1u  |. 0 1.aa  bb  ..
r2d  |. 0 1.aa  bb  ..
r2u  |.0 1 .  aa  bb..
r3d  |  .0aa1bb.  ..
r3u  |01.      .aa..bb
""",
    ("chimera", 8): """
r0d  |01.      .aa2.bb3      .cc..dd
r0u  |  .0aa1bb.   .   2cc3dd.  ..
r1d  |.0 1 .  aa  bb2 .3 .  cc  dd..
r1u  |. 0 1.aa  bb   2. 3.cc  dd  ..
r2d  |. 0 1.aa  bb   2. 3.cc  dd  ..
r2u  |.0 1 .  aa  bb2 .3 .  cc  dd..
r3d  |  .0aa1bb.   .   2cc3dd.  ..
r3u  |01.      .aa2.bb3      .cc..dd
""",
    ("dualpipe", 8): """
r0d  |012    3   aa   .bb  cCdD
r0u  |   0aA1 bb2  cc3.  dd
r1d  |.0 1 2   aa3   bb  cc d D
r1u  |. 0 1 aa2   bb3  cc  d D
r2d  |. 0 1 aa2   bb3  cc  d D
r2u  |.0 1 2   aa3   bb  cc d D
r3d  |   0aA1 bb2  cc3.  dd
r3u  |012    3   aa   .bb  cCdD
""",
    ("bitpipe", 4): """
r0d0 |01.          .        aa..bb
r0d1 |  .    0aa1bb.          ..
r0u0 |  .0 1       .  aa  bb  ..
r0u1 |  . 0 1      .aa  bb    ..
r1d0 |.0 1     .          aa  bb..
r1d1 |.     0 1.aa  bb          ..
r1u0 |. 0 1    .        aa  bb  ..
r1u1 |.    0 1 .  aa  bb        ..
r2d0 |. 0 1    .        aa  bb  ..
r2d1 |.    0 1 .  aa  bb        ..
r2u0 |.0 1     .          aa  bb..
r2u1 |.     0 1.aa  bb          ..
r3d0 |  .0 1       .  aa  bb  ..
r3d1 |  . 0 1      .aa  bb    ..
r3u0 |01.          .        aa..bb
r3u1 |  .    0aa1bb.          ..
""",
}
NAMES = ("gems", "chimera", "dualpipe", "bitpipe")


@pytest.mark.parametrize(("name", "microbatches"), GRIDS)
def test_grid(name: str, microbatches: int) -> None:
    """The sources' pictures number the micro-batches of each direction from 0; ours all of them."""
    rows = GRIDS[name, microbatches].strip().splitlines()
    drawn = to_text(build(name, ranks=4, microbatches=microbatches), Costs()).splitlines()[: len(rows)]
    assert [_numbered_by_direction(row).rstrip() for row in drawn] == [row.rstrip() for row in rows]


def _numbered_by_direction(row: str) -> str:
    label, bar, cells = row.partition("|")
    halved = str.maketrans("0123456789abcdefghABCDEFGH", "0011223344aabbccddAABBCCDD")
    return label + bar + cells.translate(halved)


@pytest.mark.parametrize(
    ("name", "span", "idle", "inner", "peaks"),
    [
        ("gems", 75, 0.680, 48, (1, 1, 1, 1)),
        ("chimera", 30, 0.200, 6, (3, 4, 4, 3)),
        ("dualpipe", 25, 0.040, 1, (5, 5, 5, 5)),
    ],
)
def test_four_ranks_eight_microbatches(
    name: str, span: float, idle: float, inner: float, peaks: tuple[float, ...]
) -> None:
    assert_figures(build(name, ranks=4, microbatches=8), span, idle, inner, peaks)


# The source's order of one unit, its micro-batches numbered by direction and forwards of two written as the first.
DOUBLED = """
F0==F2==. . f0==b0==b1==f2==b2==b3==B0==B1==. . B2==B3==
. . F0==f0==F2==f2==b0==b1==B0==B1==b2==b3==B2==B3==. .
. . f0==F0==f2==F2==B0==B1==b0==b1==B2==B3==b2==b3==. .
f0==f2==. . F0==B0==B1==F2==B2==B3==b0==b1==. . b2==b3==
"""


def test_a_unit_of_doubled_forwards_is_the_sources() -> None:
    """Capitals are the pipeline down; a backward of a micro-batch takes as long as the forward of two."""
    schedule = build("chimera", ranks=4, microbatches=8, variant="doubling")
    times = simulate(schedule, Costs())
    rows = []
    for rank, row in enumerate(schedule.actions):
        drawn = [". . "] * 14
        for index, action in enumerate(row):
            assert action.microbatch is not None
            group, second = divmod(action.microbatch, 2)
            number, up = divmod(group, 2)
            letters = "fb" if up else "FB"
            if action.op is Op.F and second:
                continue
            slot = round(times.start[rank][index] / 2)
            drawn[slot] = f"{letters[action.op is Op.B]}{2 * number + second}=="
        rows.append("".join(drawn))
    assert [row.rstrip() for row in rows] == DOUBLED.strip().splitlines()


@pytest.mark.parametrize(("ranks", "units"), [(2, 3), (4, 1), (6, 2), (8, 1)])
def test_bubbles_of_chimeras_variants(ranks: int, units: int) -> None:
    """Only units as they are leave gaps between them, where B = 2 F."""
    idle, rest = ranks - 2, ranks // 2 - 1
    closed = {
        "concatenation": (units * ranks, (units + 1) * idle, 1),
        "doubling": (2 * units * ranks, 2 * idle, 2),
        "halving": (units * ranks, idle, 1),
    }
    for variant, (microbatches, expected, held) in closed.items():
        schedule = build("chimera", ranks=ranks, microbatches=microbatches, variant=variant)
        assert check_program(lower(schedule)) == []
        found = simulate(schedule, Costs())
        assert found.makespan == 3 * microbatches + expected, variant
        assert found.bubble_ratio == pytest.approx(expected / found.makespan)
        assert found.peak_activations[0] == held * (rest + 2 if units * ranks > 2 else ranks), variant
        program = simulate(lower(schedule), Costs())
        assert program.makespan == found.makespan, variant


def test_joined_forwards_stand_together() -> None:
    schedule = build("chimera", ranks=2, microbatches=4, variant="doubling")
    first, second, *rest = schedule.actions[0]
    wrong = replace(schedule, actions=((second, first, *rest), *schedule.actions[1:]))
    assert check(wrong) == ["rank 0, cell 1 (0F0): must be followed by 0F1"]
    assert "(3) must be a multiple of joined (2)" in check(replace(schedule, pipeline_of_microbatch=(0, 0, 1)))[0]


@pytest.mark.parametrize(("variant", "microbatches"), [("doubling", 8), ("halving", 4)])
def test_variants_are_written_and_read(variant: str, microbatches: int, tmp_path: Path) -> None:
    schedule = build("chimera", ranks=4, microbatches=microbatches, variant=variant)
    document = to_json(schedule, Costs())
    cells = document["actions"][0][:6]
    assert cells == (
        ["0F0+1", "0F4+5", "3F2+3", "3B2", "3B3", "3F6+7"]
        if variant == "doubling"
        else ["0F0", "0F2", "3F1", "3B1.0", "3B1.1", "3F3"]
    )
    assert document["microbatches"] == microbatches == len(document["pipeline_of_microbatch"])
    file = tmp_path / "order.csv"
    file.write_text(to_csv(schedule), encoding="utf-8")
    again = build("from_file", ranks=4, microbatches=microbatches, file=str(file))
    assert replace(again, name=schedule.name) == schedule


@pytest.mark.parametrize("ranks", [4, 6])
def test_bubbles_of_the_literature(ranks: int) -> None:
    """Chimera's and BitPipe's of one unit, for B = F and for B = 2 F; GEMS's limits."""
    for name, equal, double in (("chimera", 2, 1.5), ("bitpipe", 4, 3)):
        schedule = build(name, ranks=ranks, microbatches=ranks)
        for costs, work in ((Costs(B=1), equal), (Costs(), double)):
            expected = (ranks - 2) / (work * ranks + ranks - 2)
            assert simulate(schedule, costs).bubble_ratio == pytest.approx(expected), (name, costs)
    many = build("gems", ranks=ranks, microbatches=200)
    assert simulate(many, Costs()).bubble_ratio == pytest.approx((ranks - 1) / (ranks + 0.5), abs=5e-3)
    assert simulate(many, Costs(B=1)).bubble_ratio == pytest.approx((ranks - 1) / (ranks + 1), abs=5e-3)


@pytest.mark.parametrize(("ranks", "pipes"), [(4, 4), (8, 4), (8, 8), (12, 6)])
def test_more_pipelines_leave_less_idle(ranks: int, pipes: int) -> None:
    units = 3 if ranks < 8 else 1
    schedule = build("chimera", ranks=ranks, microbatches=units * ranks, pipes=pipes)
    assert check_program(lower(schedule)) == []
    idle = 2 * ranks // pipes - 2
    assert simulate(schedule, Costs(B=1)).makespan == 2 * units * ranks + idle
    assert simulate(schedule, Costs()).makespan == 3 * units * ranks + (units + 1) * idle
    assert versions_held(schedule) == (pipes,) * ranks
    peaks = simulate(schedule, Costs()).peak_activations
    assert min(peaks) == ranks - ranks // pipes + 1
    assert max(peaks) == ranks


def _unit_order(ranks: int, rank: int) -> list[str]:
    """The order of one unit as it is published, step by step; the k-th micro-batch of each op and direction."""
    half = ranks // 2
    own, other = (0, 1) if rank < half else (1, 0)
    first = half - rank if rank < half else rank - half + 1
    steps = [("F", own)] * first + [("F", other), ("F", own)] * (half - first) + [("F", other), ("B", other)] * first
    steps += [("B", own), ("B", other)] * (half - first) + [("B", own)] * first
    counts: dict[tuple[str, int], int] = {}
    order = []
    for op, pipe in steps:
        count = counts.get((op, pipe), 0)
        counts[op, pipe] = count + 1
        order.append(f"{ranks - 1 - rank if pipe else rank}{op}{2 * count + pipe}")
    return order


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 10])
def test_chimeras_published_order(ranks: int) -> None:
    schedule = build("chimera", ranks=ranks, microbatches=ranks)
    assert [[str(action) for action in row] for row in schedule.actions] == [
        _unit_order(ranks, rank) for rank in range(ranks)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_twins_are_mirrored(name: str) -> None:
    """Stage s lives on ranks r and D - 1 - r, once for each direction, and is reduced on both."""
    schedule = build(name, ranks=4, microbatches=8)
    assert schedule.pipeline_of_microbatch == (0, 1) * 4
    assert [3 - rank for rank in schedule.placement[0]] == list(schedule.placement[1])
    assert versions_held(schedule) == (2, 2, 2, 2)
    program = lower(schedule)
    for row, suffix in enumerate(("", ":1")):
        rank = schedule.placement[row][0]
        texts = [str(action) for action in program.actions[rank]]
        assert texts.count(f"0REDUCE{suffix}") == texts.count(f"0STEP{suffix}") == 1


def test_a_step_waits_for_every_copys_gradients_and_a_reduction_for_its_own() -> None:
    schedule = build("chimera", ranks=4, microbatches=4)
    step = Action(Op.STEP, 1, row=1)
    assert set(dependencies(schedule, step)) == {Action(Op.REDUCE, 1), Action(Op.REDUCE, 1, row=1)}
    assert set(map(str, dependencies(schedule, Action(Op.REDUCE, 1, row=1)))) == {"1B1", "1B3"}
    assert parse_action("1STEP:1") == step


def test_reductions_begin_before_the_last_backward() -> None:
    """The stages that end first are summed beside the rest of the compute."""
    program = lower(build("chimera", ranks=4, microbatches=4))
    texts = [str(action) for action in program.actions[0]]
    assert texts.index("3REDUCE:1") < texts.index("0B0") < texts.index("0REDUCE")


def test_an_odd_middle_rank_holds_its_stage_once() -> None:
    schedule = build("gems", ranks=3, microbatches=4)
    assert schedule.copies_of(1) == (0,)
    assert versions_held(schedule) == (2, 1, 2)
    assert [str(action) for action in lower(schedule).actions[1]].count("1STEP") == 1


def test_shared_stages_that_are_reduced_in_different_orders_are_found() -> None:
    program = lower(build("gems", ranks=2, microbatches=2))
    row = list(program.actions[0])
    first, second = (place for place, action in enumerate(row) if action.op is Op.REDUCE)
    row.insert(second, row.pop(first))
    broken = replace(
        program,
        actions=(tuple(row), program.actions[1]),
        order=tuple((0, action) for action in row) + tuple((1, action) for action in program.actions[1]),
    )
    assert "ranks 0, 1 reduce the stages that they share in different orders" in check_program(broken)


def test_forwards_alone_go_through_the_first_pipeline() -> None:
    from runner.schedule import forward_only

    schedule: Schedule = forward_only(build("bitpipe", ranks=4, microbatches=4), 3)
    assert schedule.placement == ((0, 1, 2, 3, 3, 2, 1, 0),)
    assert check_program(lower(schedule)) == []
