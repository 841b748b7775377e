"""From which action to which something lives: small schedules written out, and what holds for all."""

from __future__ import annotations

import pytest

from runner.schedule.catalogue.registry import NAMES, build
from runner.schedule.generators.one_directional.pipefisher import KFAC
from runner.schedule.liveness import ACTIVATIONS, Kind, Lifetime, lifetimes, most_at_once, weight_lifetimes
from runner.schedule.lowering.program import lower
from runner.schedule.values import Program, Schedule, parse_action


def written(view: Schedule | Program, rank: int, *kinds: Kind) -> list[str]:
    """A rank's lifetimes: stage and micro-batch, from which action to which."""
    return [
        f"{each.kind} {each.stage}/{each.microbatch}: {each.begins}..{each.ends}"
        for each in lifetimes(view)[rank]
        if not kinds or each.kind in kinds
    ]


def schedule_of(*rows: str, stages: tuple[int, ...] = (0, 1), **options: object) -> Schedule:
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    microbatches = 1 + max(action.microbatch or 0 for row in actions for action in row)
    return Schedule("mine", (stages,), (0,) * microbatches, actions, **options)  # type: ignore[arg-type]


def test_a_program_of_two_stages() -> None:
    program = lower(schedule_of("0F0 0B0", "1F0 1I0 1W0"))
    assert written(program, 0) == ["saved 0/0: 0F0..0B0", "output gradient 0/0: 0RECV_B0<1..0B0"]
    assert written(program, 1) == [
        "saved 1/0: 1F0..1I0",
        "input 1/0: 1RECV_F0<0..1I0",
        "input gradient 1/0: 1I0..1SEND_B0>0",
        "deferred 1/0: 1I0..1W0",
        "leaving gradient 1/0: None..1SEND_B0>0",  # that of the window before
        "leaving gradient 1/0: 1SEND_B0>0..None",
    ]


def test_only_the_last_message_of_the_window_before_is_still_there() -> None:
    program = lower(schedule_of("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"))
    assert written(program, 1, Kind.LEAVING_GRADIENT) == [
        "leaving gradient 1/1: 1SEND_B1>0..1SEND_B0>0",
        "leaving gradient 1/0: None..1SEND_B1>0",
        "leaving gradient 1/0: 1SEND_B0>0..None",
    ]


def test_a_schedule_knows_no_messages() -> None:
    schedule = schedule_of("0F0 0B0", "1F0 1R0 1B0")
    assert written(schedule, 0) == ["saved 0/0: 0F0..0B0"]
    assert written(schedule, 1) == [
        "saved 1/0: 1F0..1F0",
        "saved 1/0: 1R0..1B0",
        "output 1/0: 1F0..1B0",
        "input 1/0: 1F0..1B0",
    ]


def test_neighbours_on_one_rank_hand_over() -> None:
    """The second stage's input is the first one's output, and has no memory of its own."""
    program = lower(schedule_of("0F0 1F0 1B0 0B0", stages=(0, 0), chunks=2))
    assert written(program, 0) == ["saved 1/0: 1F0..1B0", "saved 0/0: 0F0..0B0", "output gradient 0/0: 1B0..0B0"]


def test_what_is_lent_lives_elsewhere() -> None:
    schedule = schedule_of("0F0 0OUT0>1 0F1 0IN0<1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert written(schedule, 1, Kind.STASH) == ["stash 0/0: 0OUT0>1..0IN0<1"]
    assert written(schedule, 0, Kind.SAVED)[:2] == ["saved 0/0: 0F0..0OUT0>1", "saved 0/0: 0IN0<1..0B0"]
    program = lower(schedule)
    assert written(program, 1, Kind.STASH) == ["stash 0/0: 0RECV_S0<0..0SEND_S0>0"]
    assert written(program, 0, Kind.SAVED)[:2] == ["saved 0/0: 0F0..0SEND_S0>1", "saved 0/0: 0RECV_S0<1..0B0"]


def test_sums_keep_what_autograd_lets_go() -> None:
    """K-FAC's sum of a backward that comes after its forward's sum keeps gradients alone."""
    schedule = schedule_of("0F0 0F1 0CURV_A0 0B0 0B1 0CURV_B0 0CURV_A1 0CURV_B1", stages=(0,), filling=KFAC)
    assert written(schedule, 0, Kind.LEFT_TO_FILL) == [
        "left to a fill 0/0: 0B0..0CURV_B0",
        "left to a fill 0/1: 0B1..0CURV_A1",
        "left to a fill 0/1: 0B1..0CURV_B1",
    ]


def test_versions_of_weights() -> None:
    row = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    schedule = schedule_of(row, stages=(0,), window_of_microbatch=(0, 1, 2, 3), lags=(1,))

    def versions(view: Schedule | Program) -> list[str]:
        return [f"{each.version}: {each.begins}..{each.ends}" for each in weight_lifetimes(view)[0]]

    assert versions(schedule) == ["0: None..0B1", "1: 0B0..0B2", "2: 0B1..0B3", "3: 0B2..0B3", "4: 0B3..None"]
    program = lower(schedule)
    assert versions(program)[:3] == ["0: None..0B1", "1: 0STEP..0B2", "2: 0STEP@1..0B3"]
    assert most_at_once(program.actions[0], weight_lifetimes(program)[0]) == 2


@pytest.mark.parametrize("name", [name for name in NAMES if name != "from_file"])
def test_a_program_keeps_activations_as_its_schedule_does(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    program = lower(schedule)
    assert not [each for rank in lifetimes(program) for each in rank if each.ends is None and each.kind in ENDING]
    if not schedule.moves:
        assert [activations(rank) for rank in lifetimes(program)] == [activations(rank) for rank in lifetimes(schedule)]


ENDING = set(Kind) - {Kind.LEAVING_GRADIENT, Kind.LEAVING_OUTPUT}  # the last message leaves after the list


def activations(living: tuple[Lifetime, ...]) -> set[Lifetime]:
    return {each for each in living if each.kind in ACTIVATIONS}
