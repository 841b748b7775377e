"""Work of one's own in the bubbles: declared here alone, and checked, placed, lowered, simulated and drawn by all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.schedule import build, check, lower, simulate
from runner.schedule.checking.program import check_program
from runner.schedule.fills import Filling, FillKind, Shown
from runner.schedule.generators.fill_bubbles import fill_bubbles
from runner.schedule.liveness import Kind, lifetimes
from runner.schedule.render import to_json, to_svg, to_text
from runner.schedule.simulation.clock import Costs
from runner.schedule.stream import streams_of
from runner.schedule.values import Action, Op, Schedule, parse_action

TALLY = FillKind("TALLY", "tally", 0.25, "t", "#123456", "tallies of forwards", shown_by=Shown.FORWARD)
WARM = FillKind("WARM", "warm", 1.0, "w", "#234567", "warming up")
SETTLE = FillKind("SETTLE", "settle", 2.0, "s", "#345678", "settlements", follows="TALLY")
AUDIT = Filling(
    work="the auditor",
    key="audit",
    brings="settlements",
    legend="t tallies, w warms, s settles",
    optimizer="auditor",
    description="tallies and settlements",
    kinds=(TALLY, WARM, SETTLE),
)
COSTS = Costs(fills={"settle": 3.0})  # the others cost what their kinds say


def audited(ranks: int = 2, microbatches: int = 2) -> Schedule:
    base = build("1f1b", ranks=ranks, microbatches=microbatches)
    return fill_bubbles(base, AUDIT, COSTS.per_stage(ranks, 1, filling=AUDIT), "audited")


def test_it_is_placed_by_priority_once_what_it_waits_for_is_there() -> None:
    """Rank 0 idles for 2 before its first backward and for 1 before its second, rank 1 for 1 at the end.

    Two tallies and WARM take 1.5 of the 2, with margins. What waits on rank 1 has its tallies at the end; WARM, of 1,
    and SETTLE, of 3, have room in no gap of theirs, and make the step longer.
    """
    schedule = audited()
    assert schedule.windows == 1
    assert [[str(action) for action in row] for row in schedule.actions] == [
        ["0F0", "0F1", "0TALLY0", "0TALLY1", "0WARM", "0B0", "0B1", "0SETTLE"],
        ["1F0", "1B0", "1F1", "1B1", "1TALLY0", "1TALLY1", "1WARM", "1SETTLE"],
    ]
    assert check(schedule) == []


def test_it_costs_what_its_kinds_say() -> None:
    times = simulate(audited(), COSTS)
    assert times.filling == (2 * 0.25 + 1.0 + 3.0,) * 2
    assert times.makespan == 9.0 + 3.0  # the settlements fit no gap
    assert times.utilisation_without_fills == pytest.approx(2 * 6.0 / (2 * 12.0))


def test_it_is_lowered_before_the_update_that_uses_it() -> None:
    program = lower(audited())
    assert check_program(program) == []
    for rank, row in enumerate(program.actions):
        texts = [str(action) for action in row]
        assert texts.index(f"{rank}SETTLE") < texts.index(f"{rank}STEP")
    assert [stream.segment(1) for stream in streams_of(program)]


def test_it_is_drawn_with_its_own_characters_and_colours() -> None:
    grid = to_text(audited(), COSTS)
    assert "t tallies, w warms, s settles" in grid
    assert "new settlements every 1 steps" in grid
    assert "with the auditor's work" in grid
    first = grid.splitlines()[0]
    assert (first.count("t"), first.count("w"), first.count("s")) == (2, 4, 12)
    drawn = to_svg(audited(), COSTS)
    assert all(kind.color in drawn and kind.label in drawn for kind in AUDIT.kinds)
    document = to_json(audited(), COSTS)
    assert document["utilisation"].keys() == {"with_audit", "without"}
    assert {key: document["costs"][key] for key in ("tally", "warm", "settle")} == {
        "tally": 0.25,
        "warm": 1.0,
        "settle": 3.0,
    }


def test_what_waits_for_it_lives_until_it_is_done() -> None:
    living = lifetimes(audited())[1]
    left = [f"{each.fill} {each.begins}..{each.ends}" for each in living if each.kind is Kind.LEFT_TO_FILL]
    assert left == ["TALLY 1B0..1TALLY0", "TALLY 1B1..1TALLY1"]
    assert not [each for each in lifetimes(audited())[0] if each.kind is Kind.LEFT_TO_FILL]


BROKEN = {
    "a tally of no micro-batch": ("0TALLY0", "0TALLY", "a fill is of a micro-batch of the first window"),
    "warming for a micro-batch": ("0WARM", "0WARM1", "a fill is of a micro-batch of the first window"),
    "work of nobody": ("0WARM", "0COOL", "audited is filled with TALLY, WARM, SETTLE"),
    "twice": ("0TALLY0", "0TALLY1", "0TALLY1 is there 2 times"),
    "on another rank": ("0WARM", "1WARM", "stage 1 must be on this rank, and on no other"),
    "a tally before its forward": ("0F1", "0TALLY1", "hangs, because it waits for 0F1"),
    "a settlement before a tally": ("0TALLY1", "0SETTLE", "hangs, because it waits for 0TALLY1"),
}


@pytest.mark.parametrize(("one", "other", "says"), BROKEN.values(), ids=BROKEN)
def test_its_defects_are_named(one: str, other: str, says: str) -> None:
    """The first action takes the other one's name; of those that hang, the two change places."""
    schedule = audited()
    swaps = "hangs" in says
    names = {one: other, other: one} if swaps else {one: other}
    rows = tuple(tuple(_renamed(action, names) for action in row) for row in schedule.actions)
    assert any(says in line for line in check(replace(schedule, actions=rows))), check(replace(schedule, actions=rows))


def _renamed(action: Action, names: dict[str, str]) -> Action:
    return parse_action(names.get(str(action), str(action)))


@pytest.mark.parametrize("name", ["F", "FB", "STEP", "SEND_F", "OUT", "IN", "lower", "X", "X1", "_X"])
def test_a_name_that_no_action_could_print_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="capitals"):
        replace(WARM, name=name)
    if name != "STEP":
        with pytest.raises(ValueError, match="is no action"):
            parse_action(f"0{name}")


@pytest.mark.parametrize("name", ["INV_A", "INNER", "STEPS", "OUTER", "SEND_FAR", "FX"])
def test_other_names_are_printed_and_read(name: str) -> None:
    for action in (Action(Op.FILL, 3, fill=name), Action(Op.FILL, 3, 12, window=2, fill=replace(WARM, name=name).name)):
        assert parse_action(str(action)) == action
