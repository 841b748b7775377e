"""K-FAC's work in bubbles: where the rule puts it, what it costs, and what the checker makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.schedule import build, check, lower, simulate
from runner.schedule.checking.program import check_program
from runner.schedule.generators.fill_bubbles import Gap, fill
from runner.schedule.generators.one_directional.pipefisher import KFAC
from runner.schedule.render import to_json, to_text
from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Action, Op, Schedule, parse_action

ROW = [parse_action(text) for text in ("0F0", "0F1", "0B0", "0B1")]
WORK = [parse_action(text) for text in ("0CURV_A0", "0CURV_A1", "0CURV_B0", "0CURV_B1", "0INV_A", "0INV_B")]


def placed(gaps: list[tuple[int, float]], sums: float, inversions: float) -> list[dict[int, str]]:
    """Of each step, the work before each index of ``ROW``."""

    def seconds(item: Action) -> float:
        return sums if item.microbatch is not None else inversions

    found = fill(ROW, [Gap(*gap) for gap in gaps], WORK, seconds, KFAC)
    return [{index: " ".join(map(str, work)) for index, work in filling.items()} for filling in found]


BY_HAND = {
    "a sum waits for what shows it": (
        [(2, 2.2), (3, 1.1), (4, 3.2)],
        1.0,
        1.0,
        [{2: "0CURV_A0 0CURV_A1", 3: "0CURV_B0", 4: "0CURV_B1 0INV_A 0INV_B"}],
    ),
    "before the first forward there is nothing to do in the first step": (
        [(0, 100.0)],
        1.0,
        1.0,
        [{}, {0: "0CURV_A0@1 0CURV_A1@1 0CURV_B0@1 0CURV_B1@1 0INV_A@1 0INV_B@1"}],
    ),
    "inputs first, and an inversion where a sum is not ready": (
        [(2, 6.5), (4, 3.2)],
        1.0,
        2.0,
        [{2: "0CURV_A0 0CURV_A1 0INV_A", 4: "0CURV_B0 0CURV_B1"}, {2: "0INV_B@1"}],
    ),
    "a gap as long as the work has no room for its margin": (
        [(4, 1.0)],
        1.0,
        0.5,
        [{4: "0CURV_A0 0CURV_A1 0CURV_B0 0CURV_B1"}, {4: "0INV_A@1"}, {4: "0INV_B@2"}],
    ),
    "what no gap is long enough for comes at the end, once it is ready": (
        [(2, 1.1)],
        1.0,
        9.0,
        [{2: "0CURV_A0"}, {2: "0CURV_A1@1", 4: "0INV_A@1"}, {2: "0CURV_B0@2"}, {2: "0CURV_B1@3", 4: "0INV_B@3"}],
    ),
    "no gaps at all": (
        [],
        1.0,
        1.0,
        [{4: "0CURV_A0 0CURV_A1 0CURV_B0 0CURV_B1 0INV_A 0INV_B"}],
    ),
}


@pytest.mark.parametrize(("gaps", "sums", "inversions", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_rule_by_hand(
    gaps: list[tuple[int, float]], sums: float, inversions: float, expected: list[dict[int, str]]
) -> None:
    assert placed(gaps, sums, inversions) == expected


@pytest.mark.parametrize("base", ["1f1b", "gpipe"])
def test_example_of_four_ranks(base: str) -> None:
    """Nine idle units a rank and step; 4 * 0.5 + 4 * 0.5 + 1.5 + 1.5 = 7 units of work take two steps' bubbles."""
    schedule = build("pipefisher", ranks=4, microbatches=4, base=base)
    plain = simulate(build(base, ranks=4, microbatches=4), Costs())
    times = simulate(schedule, Costs())
    assert [plain.makespan - busy for busy in plain.busy] == [9.0] * 4
    assert schedule.windows == 2
    assert times.filling == (7.0,) * 4
    assert times.makespan == 2 * plain.makespan == 42.0
    assert times.bubble_ratio == pytest.approx(1 - (2 * 12 + 7) / 42)
    assert times.utilisation_without_fills == pytest.approx(12 / 21)
    document = to_json(schedule, Costs())
    assert document["refresh_interval"] == 2
    assert document["utilisation"] == {"with_curvature": pytest.approx(31 / 42), "without": pytest.approx(12 / 21)}
    assert "new inverses every 2 steps; ranks work 73.8 % of the time" in to_text(schedule, Costs())


def test_inverses_are_there_before_their_steps_update() -> None:
    program = lower(build("pipefisher", ranks=4, microbatches=4))
    row = [str(action) for action in program.actions[3]]
    assert row.index("3INV_A") < row.index("3STEP") < row.index("3INV_B@1") < row.index("3STEP@1")
    second = [str(action) for action in program.of_window(3, 1)]
    assert second[0] == "3INV_B@1"
    assert [text for text in second if text.startswith("3F")] == ["3F0", "3F1", "3F2", "3F3"]


seconds = st.floats(0.0, 8.0)


@st.composite
def _requests(draw: st.DrawFn) -> tuple[Schedule, Schedule, StageCosts]:
    ranks, microbatches = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    each = st.lists(seconds, min_size=ranks, max_size=ranks)
    costs = StageCosts(
        F=draw(st.lists(st.floats(0.5, 3.0), min_size=ranks, max_size=ranks)),
        B=draw(st.lists(st.floats(0.5, 6.0), min_size=ranks, max_size=ranks)),
        comm=draw(st.lists(st.floats(0.0, 1.0), min_size=ranks - 1, max_size=ranks - 1)),
        fills={kind: draw(each) for kind in ("CURV_A", "CURV_B", "INV_A", "INV_B")},
    )
    asked: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches}
    base = draw(st.sampled_from(["1f1b", "gpipe"]))
    return build(base, **asked), build("pipefisher", **asked, base=base, costs=costs), costs


@settings(max_examples=40, deadline=None)
@given(_requests())
def test_any_costs(found: tuple[Schedule, Schedule, StageCosts]) -> None:
    """All work once, one thing at a time, and no step longer than its own work and what no bubble has room for."""
    base, schedule, costs = found
    assert check(schedule) == []
    assert check_program(lower(schedule, costs)) == []
    times, alone = simulate(schedule, costs), simulate(base, costs)
    for starts, ends in zip(times.start, times.end, strict=True):
        assert all(end <= start + 1e-9 for end, start in zip(ends[:-1], starts[1:], strict=True))
    left = [0.0] * schedule.ranks
    for rank, row in enumerate(schedule.actions):
        idle = [0.0, *alone.end[rank]]
        gaps = [start - free for start, free in zip((*alone.start[rank], alone.makespan), idle, strict=True)]
        for action in row:
            if action.op is Op.FILL:
                takes = costs.fills[action.work][action.stage]
                left[rank] += takes if 1.05 * takes > max(gaps) else 0.0
    assert times.makespan <= schedule.windows * alone.makespan + sum(left) + 1e-6
    assert times.makespan >= schedule.windows * alone.makespan - 1e-6


def broken(schedule: Schedule, change: dict[str, str | None]) -> list[str]:
    """The defects of a schedule with actions of its rows renamed, or left out."""

    def renamed(row: tuple[Action, ...]) -> tuple[Action, ...]:
        texts = [change.get(str(action), str(action)) for action in row]
        return tuple(parse_action(text) for text in texts if text is not None)

    return check(replace(schedule, actions=tuple(map(renamed, schedule.actions))))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"1INV_B@1": None}, "stage 1: 1INV_B is there 0 times"),
        ({"1INV_B@1": "1INV_B@7"}, "there are only 2 windows"),
        ({"1CURV_B3": "1INV_B", "1INV_B@1": "1CURV_B3@1"}, "hangs, because it waits for 1CURV_B3@1"),
        ({"1INV_A@1": "1INV_A"}, "belongs to window 0, but window 1 has begun"),
    ],
)
def test_defects_are_named(change: dict[str, str | None], says: str) -> None:
    schedule = build("pipefisher", ranks=4, microbatches=4)
    assert any(says in line for line in broken(schedule, change)), broken(schedule, change)
