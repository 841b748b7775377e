"""The schedules whose pipelines run in both directions: each stage lives on several ranks, as twins."""

from __future__ import annotations

from runner.errors import Problem
from runner.schedule.generators.bitpipe import bitpipe
from runner.schedule.generators.chimera import chimera
from runner.schedule.generators.dualpipe import dualpipe
from runner.schedule.generators.gems import gems
from runner.schedule.specs import Formulas, Legal, ScheduleRequest, ScheduleSpec

__all__ = ["BIDIRECTIONAL"]

_VARIANTS = ("concatenation",)
_EVEN_RANKS = Legal("even", lambda _, ranks: ranks % 2 == 0)
_MULTIPLE = Legal("a multiple of D", lambda ranks, microbatches: microbatches % ranks == 0)


def _formulas(idle: str, peak: str, inner_idle: str | None = None, when: str = "True") -> Formulas:
    """Of a schedule that takes ``idle`` beyond its compute."""
    work = "T * (F + B)"
    return Formulas(f"{work} + {idle}", f"{idle} / ({work} + {idle})", peak, inner_idle or idle, when)


def _chimera_problems(request: ScheduleRequest) -> list[Problem]:
    problems = []
    if request.variant not in (None, *_VARIANTS):
        why = "It says how units of D micro-batches follow each other"
        rule = f"must be one of {', '.join(_VARIANTS)}"
        problems.append(Problem("schedule.variant", request.variant, rule, why, f"schedule.variant={_VARIANTS[0]}"))
    pipes, ranks = request.pipes or 2, request.ranks
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
        source="Jain et al., GEMS, 2020",
        formulas=_formulas("(D - 1) * (T * B + F)", "1", "(D - 1) * (T * B + F * (T % 2))", when="B >= F"),
        generate=lambda request: gems(request.ranks, request.microbatches),
        microbatches=Legal("at least 2, one down and one up", lambda ranks, microbatches: microbatches >= 2),
    ),
    ScheduleSpec(
        name="chimera",
        description="pipelines down and up fill each other's bubble, for schedule.pipes times the weights",
        source="Li and Hoefler, Chimera, 2021",
        formulas=_formulas("(D - 2) * (T / D * B - (T / D - 1) * F)", "D / 2 + 1 + min(r, D - 1 - r)", when="B >= F"),
        generate=lambda request: chimera(request.ranks, request.microbatches, request.pipes or 2),
        ranks=_EVEN_RANKS,
        microbatches=_MULTIPLE,
        constraint=_chimera_problems,
        keys=frozenset({"variant", "pipes"}),
    ),
    ScheduleSpec(
        name="dualpipe",
        description="micro-batches enter at both ends, weight gradients fill the rest; pairs of F and B in turn",
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
