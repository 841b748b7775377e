"""What is known of a schedule: request, formulas, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from runner.errors import Problem
from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Schedule

__all__ = ["Formulas", "Legal", "ScheduleRequest", "ScheduleSpec"]


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """What a user asks of a schedule.

    Args:
        ranks: pipeline ranks, D.
        microbatches: per optimizer step and data replica, T.
        chunks: model chunks per rank, v; None means the schedule's own.
        variant: of ``chimera``: how its units follow each other: as they are (``concatenation``, which None means),
            with forwards of two micro-batches (``doubling``), with backwards of half a one (``halving``).
        pipes: of ``chimera``: pipelines, half of them in each direction; None means 2.
        file: of ``from_file``.
        memory_limit: of ``zb_auto``: micro-batches of its whole share that a rank may keep between F and W; None
            means D, as many as 1F1B keeps on its first rank. Of an opportunistic ``varuna``: those between F and B up
            to which a rank takes a forward before its turn; None means all.
        base: of ``pipefisher``: the schedule whose bubbles are filled, ``1f1b``, which None means, or ``gpipe``.
        opportunistic: of ``varuna``: a forward in place of a backward whose gradient is late; None means not.
        target, kwargs: a user's own schedule, as ``package.module:name``, and further arguments of a function.
        costs: of ``zb_auto`` and ``pipefisher``: the durations from which they find their order.
    """

    ranks: int
    microbatches: int
    chunks: int | None = None
    file: str | None = None
    memory_limit: int | None = None
    costs: Costs | StageCosts = Costs()
    variant: str | None = None
    pipes: int | None = None
    opportunistic: bool | None = None
    base: str | None = None
    target: str | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Formulas:
    """Closed forms for D > 1 equal stages and free messages, without variant or pipes, in Python's notation.

    D ranks, T micro-batches, v chunks per rank, r the rank; F, B, I and W the durations of a rank's whole share.

    Args:
        span: duration of one flushed step.
        bubble_ratio: idle / total rank time over the span.
        peak_activations: on rank r, in micro-batches of its whole share.
        inner_idle: most idle time of a rank between its first and its last action: what is left of the bubble where
            steps run into each other.
        when: what the durations and T must satisfy for all of these; ``True``: nothing.
    """

    span: str
    bubble_ratio: str
    peak_activations: str
    inner_idle: str
    when: str = "True"


@dataclass(frozen=True, slots=True)
class Legal:
    """Which values of one key a schedule can be made for.

    Args:
        rule: in words, after "must be".
        holds: of a number of ranks and a value.
    """

    rule: str
    holds: Callable[[int, int], bool] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """One schedule.

    Args:
        name: as in ``schedule=NAME``.
        description: one line.
        source: the paper, or where the order comes from.
        formulas: None where the order is found by search or is the user's own.
        variants: formulas of what ``schedule.variant`` may name; the empty name is none of them.
        generate: called with a request without problems.
        default_chunks: model chunks per rank; None where a file says it.
        ranks: which D there are.
        chunks: which numbers of chunks there are.
        microbatches: which T there are.
        one_rank: whether it means something on one rank, where it accumulates gradients.
        constraint: what else a request breaks.
        keys: fields of a request, of those that few schedules have, that it looks at.
        kind: "synchronous": every forward and backward of a step sees the weights that all steps before it made.
            "asynchronous": windows overlap, and some weights lack updates; ``generate`` makes as many windows as show
            the repetition.
        data_unit: what passes through the pipeline as one.
        by_costs: its order follows from the request's costs.
        by_plan: a plan chooses it, by the seconds and bytes of the stages.
        searched: ``auto`` considers it.
        summary: what it does, and its price, as the README's table says it.
        position: its place in lists, ascending.
        figures: idle share and micro-batches kept in that table, in words; None: the simulator's.
    """

    name: str
    description: str
    source: str
    formulas: Formulas | None
    generate: Callable[[ScheduleRequest], Schedule] = field(repr=False)
    default_chunks: int | None = 1
    ranks: Legal = Legal("at least 2", lambda ranks, _: True)
    chunks: Legal = Legal("1 or null", lambda ranks, chunks: chunks == 1)
    microbatches: Legal = Legal("at least 1", lambda ranks, microbatches: True)
    one_rank: bool = False
    constraint: Callable[[ScheduleRequest], list[Problem]] = field(default=lambda request: [], repr=False)
    keys: frozenset[str] = frozenset()
    variants: Mapping[str, Formulas] = field(default_factory=dict)
    kind: str = "synchronous"
    data_unit: str = "micro-batch"
    by_costs: bool = False
    by_plan: bool = False
    searched: bool = True
    summary: str = ""
    figures: tuple[str, str] | None = None
    position: int = 1000

    def formulas_of(self, variant: str | None) -> Formulas | None:
        """The formulas of a variant; None means the schedule's own."""
        return self.formulas if variant is None else self.variants[variant]

    def accepts(self, request: ScheduleRequest) -> bool:
        """Whether there is such an order for the request, whose chunks are a number."""
        ranks, chunks = request.ranks, request.chunks
        return (
            (ranks > 1 or self.one_rank)
            and self.ranks.holds(ranks, ranks)
            and chunks is not None
            and self.chunks.holds(ranks, chunks)
            and self.microbatches.holds(ranks, request.microbatches)
            and not self.constraint(request)
        )
