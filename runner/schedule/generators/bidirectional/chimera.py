"""Chimera: pipelines in both directions that fill each other's bubbles.

Source: Li and Hoefler, Chimera, 2021. A unit is D micro-batches; a unit begins one unit's work after the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from runner.errors import Problem
from runner.options import Option
from runner.schedule.generators.bidirectional.layout import of_pipelines
from runner.schedule.generators.forms import EVEN_RANKS, MULTIPLE_OF_RANKS, two_way, whole_number
from runner.schedule.generators.layout import backward, forward
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.values import Action, Schedule

__all__ = ["SPEC", "chimera", "chimera_in_pairs", "chimera_placement"]


def chimera_placement(ranks: int, pipes: int) -> list[tuple[int, ...]]:
    """Stage -> rank of each pipeline; half run down, half up, and each pair starts D / (pipes / 2) ranks further."""
    shifts = range(0, ranks, 2 * ranks // pipes)
    down = [tuple((shift + stage) % ranks for stage in range(ranks)) for shift in shifts]
    up = [tuple((shift + ranks - 1 - stage) % ranks for stage in range(ranks)) for shift in shifts]
    return [row for pair in zip(down, up, strict=True) for row in pair]


def chimera(ranks: int, microbatches: int, pipes: int) -> Schedule:
    """Generate Chimera by direct concatenation of its units.

    The order comes from slots: F and B take one slot each, and no two actions of a rank are in one slot. The k-th
    micro-batch of a pipeline enters at slot 2 k, goes through one stage per slot and turns round at the end. Two
    neighbouring pipelines of a rank use slots of different parity, and two of one direction different periods.

    Args:
        ranks: D, even.
        microbatches: a multiple of D.
        pipes: 2 f, where f divides D / 2.
    """
    placement = chimera_placement(ranks, pipes)
    per_unit = ranks // pipes  # number of micro-batches of one pipeline
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for number in range(microbatches):
        entry, pipe = divmod(number, pipes)
        unit, k = divmod(entry, per_unit)
        start = 2 * (ranks * unit + k)
        for stage, rank in enumerate(placement[pipe]):
            slots[rank].append((start + stage, forward(stage, number)))
            slots[rank].append((start + 2 * ranks - 1 - stage, backward(stage, number)))
    rows = [[action for _, action in sorted(row)] for row in slots]
    return of_pipelines("chimera", placement, rows, microbatches)


def chimera_in_pairs(ranks: int, microbatches: int, pipes: int, *, halves: bool) -> Schedule:
    """Generate Chimera with forwards of two micro-batches together, and backwards of one micro-batch each.

    If a backward takes twice as long as a forward, both then fill equal slots, and units follow each other without a
    gap: forward doubling. With ``halves``, the two are halves of one micro-batch: backward halving.

    Args:
        ranks: D, even.
        microbatches: a multiple of D; of 2 D without ``halves``.
        pipes: 2 f, where f divides D / 2.
        halves: whether to cut each micro-batch in two.
    """
    whole = chimera(ranks, microbatches if halves else microbatches // 2, pipes)
    return replace(
        whole,
        pipeline_of_microbatch=tuple(row for row in whole.pipeline_of_microbatch for _ in range(2)),
        actions=tuple(tuple(_in_pairs(row)) for row in whole.actions),
        joined=2,
        parts=2 if halves else 1,
    )


def _in_pairs(row: Iterable[Action]) -> Iterable[Action]:
    for action in row:
        number = action.microbatch or 0
        yield from (action._replace(microbatch=2 * number + which) for which in range(2))


_CHIMERA_PEAK = "D / 2 + 1 + min(r, D - 1 - r)"

_CHIMERA = {
    "concatenation": two_way("(D - 2) * (T / D * B - (T / D - 1) * F)", _CHIMERA_PEAK, when="B >= F"),
    "doubling": two_way("2 * (D - 2) * F", f"2 * ({_CHIMERA_PEAK})", when="B == 2 * F"),
    "halving": two_way("(D - 2) * F", _CHIMERA_PEAK, when="B == 2 * F"),
}


def _chimera(request: ScheduleRequest) -> Schedule:
    ranks, microbatches, pipes = request.ranks, request.microbatches, request.option("pipes") or 2
    if (form := request.option("variant")) in ("doubling", "halving"):
        return chimera_in_pairs(ranks, microbatches, pipes, halves=form == "halving")
    return chimera(ranks, microbatches, pipes)


def _chimera_problems(request: ScheduleRequest) -> list[Problem]:
    problems, form = [], request.option("variant")
    if form not in (None, *_CHIMERA):
        why = "It says how units follow each other: as they are, with doubled forwards, or with halved backwards"
        rule = f"must be one of {', '.join(_CHIMERA)}"
        problems.append(Problem("schedule.variant", form, rule, why, "schedule.variant=concatenation"))
    pipes, ranks = request.option("pipes") or 2, request.ranks
    if form == "doubling" and request.microbatches % (2 * ranks):
        why = "A unit is 2 D micro-batches, of which each forward takes two"
        more = -(-request.microbatches // (2 * ranks)) * 2 * ranks
        rule = "must be a multiple of 2 D for schedule.variant=doubling"
        problems.append(
            Problem("schedule.microbatches", request.microbatches, rule, why, f"schedule.microbatches={more}")
        )
    legal = [2 * f for f in range(1, ranks // 2 + 1) if ranks // 2 % f == 0]
    if ranks % 2 == 0 and pipes not in legal:
        near = min(legal, key=lambda each: abs(each - pipes))
        why = f"As many pipelines run down as up, at equal distances: of {ranks} ranks {', '.join(map(str, legal))}"
        rule = "must be 2 f, where f divides D / 2"
        problems.append(Problem("schedule.pipes", pipes, rule, why, f"schedule.pipes={near}"))
    return problems


SPEC = ScheduleSpec(
    name="chimera",
    position=200,
    description="pipelines down and up fill each other's bubble, for schedule.pipes times the weights",
    summary="down and up at once; `schedule.pipes` (2) times the weights; "
    "`schedule.variant=doubling` 0.077 and 8, `halving` 0.040 and 4",
    source="Li and Hoefler, Chimera, 2021",
    formulas=_CHIMERA["concatenation"],
    variants=_CHIMERA,
    generate=_chimera,
    ranks=EVEN_RANKS,
    microbatches=MULTIPLE_OF_RANKS,
    constraint=_chimera_problems,
    options=(
        Option(
            "variant",
            str,
            "how units follow each other: concatenation (as they are), doubling (forwards of two micro-batches), "
            "halving (backwards of half a micro-batch); null = concatenation",
            "doubling",
            elsewhere="The other schedules have one form",
            legal=tuple(_CHIMERA),
        ),
        whole_number(
            "pipes",
            1,
            "pipelines, half of them in each direction; null = 2",
            example=2,
            elsewhere="The other schedules have as many pipelines as they need",
            legal=(2, 4),
        ),
    ),
)
