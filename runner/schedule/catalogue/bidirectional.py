"""The schedules whose pipelines run in both directions: each stage lives on several ranks, as twins."""

from __future__ import annotations

from runner.errors import Problem
from runner.schedule.catalogue.kinds import Formulas, Legal, ScheduleRequest, ScheduleSpec
from runner.schedule.generators.bidirectional.bitpipe import bitpipe
from runner.schedule.generators.bidirectional.chimera import chimera, chimera_in_pairs
from runner.schedule.generators.bidirectional.dualpipe import dualpipe
from runner.schedule.generators.bidirectional.gems import gems
from runner.schedule.values import Schedule

__all__ = ["BIDIRECTIONAL"]

_EVEN_RANKS = Legal("even", lambda _, ranks: ranks % 2 == 0)
_MULTIPLE = Legal("a multiple of D", lambda ranks, microbatches: microbatches % ranks == 0)


def _formulas(idle: str, peak: str, inner_idle: str | None = None, when: str = "True") -> Formulas:
    """Of a schedule that takes ``idle`` beyond its compute."""
    work = "T * (F + B)"
    return Formulas(f"{work} + {idle}", f"{idle} / ({work} + {idle})", peak, inner_idle or idle, when)


_CHIMERA_PEAK = "D / 2 + 1 + min(r, D - 1 - r)"
_CHIMERA = {
    "concatenation": _formulas("(D - 2) * (T / D * B - (T / D - 1) * F)", _CHIMERA_PEAK, when="B >= F"),
    "doubling": _formulas("2 * (D - 2) * F", f"2 * ({_CHIMERA_PEAK})", when="B == 2 * F"),
    "halving": _formulas("(D - 2) * F", _CHIMERA_PEAK, when="B == 2 * F"),
}


def _chimera(request: ScheduleRequest) -> Schedule:
    ranks, microbatches, pipes = request.ranks, request.microbatches, request.pipes or 2
    if request.variant in ("doubling", "halving"):
        return chimera_in_pairs(ranks, microbatches, pipes, halves=request.variant == "halving")
    return chimera(ranks, microbatches, pipes)


def _chimera_problems(request: ScheduleRequest) -> list[Problem]:
    problems = []
    if request.variant not in (None, *_CHIMERA):
        why = "It says how units follow each other: as they are, with doubled forwards, or with halved backwards"
        rule = f"must be one of {', '.join(_CHIMERA)}"
        problems.append(Problem("schedule.variant", request.variant, rule, why, "schedule.variant=concatenation"))
    pipes, ranks = request.pipes or 2, request.ranks
    if request.variant == "doubling" and request.microbatches % (2 * ranks):
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


BIDIRECTIONAL: tuple[ScheduleSpec, ...] = (
    ScheduleSpec(
        name="gems",
        description="one micro-batch at a time, down and up in turn: the least activations, for twice the weights",
        summary="down and up in turn; twice the weights",
        source="Jain et al., GEMS, 2020",
        formulas=_formulas("(D - 1) * (T * B + F)", "1", "(D - 1) * (T * B + F * (T % 2))", when="B >= F"),
        generate=lambda request: gems(request.ranks, request.microbatches),
        microbatches=Legal("at least 2, one down and one up", lambda ranks, microbatches: microbatches >= 2),
    ),
    ScheduleSpec(
        name="chimera",
        description="pipelines down and up fill each other's bubble, for schedule.pipes times the weights",
        summary="down and up at once; `schedule.pipes` (2) times the weights; "
        "`schedule.variant=doubling` 0.077 and 8, `halving` 0.040 and 4",
        source="Li and Hoefler, Chimera, 2021",
        formulas=_CHIMERA["concatenation"],
        variants=_CHIMERA,
        generate=_chimera,
        ranks=_EVEN_RANKS,
        microbatches=_MULTIPLE,
        constraint=_chimera_problems,
        keys=frozenset({"variant", "pipes"}),
    ),
    ScheduleSpec(
        name="dualpipe",
        description="micro-batches enter at both ends, weight gradients fill the rest; pairs of F and B in turn",
        summary="both ways, forwards and backwards in pairs; twice the weights",
        source="DeepSeek-AI, DualPipe, 2025",
        formulas=_formulas("(D / 2 - 1) * F", "D + 1", when="F == I == W and B == I + W"),
        generate=lambda request: dualpipe(request.ranks, request.microbatches),
        ranks=_EVEN_RANKS,
        microbatches=Legal(
            "even, at least 2 D", lambda ranks, microbatches: microbatches % 2 == 0 and microbatches >= 2 * ranks
        ),
    ),
    ScheduleSpec(
        name="bitpipe",
        description="two Vs in opposite directions: half of chimera's bubble for twice its messages",
        summary="two Vs, both ways; twice the weights",
        source="Wu et al., BitPipe, 2024",
        formulas=_formulas(
            "(D / 2 - 1) * (T / D * B - (T / D - 1) * F)", "(3 * D + 2) / 4 + min(r, D - 1 - r) / 2", when="B >= F"
        ),
        generate=lambda request: bitpipe(request.ranks, request.microbatches),
        default_chunks=2,
        chunks=Legal("2 or null, one down and one up each V", lambda ranks, chunks: chunks == 2),
        ranks=_EVEN_RANKS,
        microbatches=_MULTIPLE,
    ),
)
