"""The entry of a schedule in the catalogue: its formulas and limits, and the request that it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from runner.errors import Problem
from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Schedule

__all__ = ["Formulas", "Legal", "ScheduleRequest", "ScheduleSpec"]


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """A user's request for a schedule.

    Args:
        ranks: D, the number of pipeline ranks.
        microbatches: T, the number of micro-batches per optimizer step and data replica.
        chunks: v, the number of model chunks per rank; None means the schedule's own number.
        variant: for ``avgpipe``, the form of averaging, ``easgd`` (also meant by None) or ``updates``. For ``chimera``,
            how its units follow each other: ``concatenation`` (also meant by None) leaves them as
            they are, ``doubling`` has forwards of two micro-batches, ``halving`` has backwards of half a micro-batch.
        pipes: for ``chimera``, the number of pipelines, half of them in each direction; for ``avgpipe``, the number of
            parallel pipelines. None means 2.
        advance: for ``avgpipe``, the number of forwards that each rank makes earlier than 1F1B would; None means 0.
        elasticity: for ``avgpipe``, the part of its distance from the average by which each pipeline is drawn to it
            after a step; it changes what a run does, but not the order. None means 1 / pipes.
        file: for ``from_file``, the path of the file.
        memory_limit: for ``zb_auto``, the number of micro-batches, in units of a rank's whole share, that a rank may
            keep between F and W; None means D, which is what 1F1B keeps on its first rank. For an opportunistic
            ``varuna``, a rank takes a forward before its turn only while it keeps fewer than this number between F
            and B; None means any number.
        base: for ``pipefisher``, the schedule whose bubbles are filled: ``1f1b`` (also meant by None) or ``gpipe``.
        wave: for ``hetpipe``, the number of optimizer steps that a worker makes from one exchange to the next, which
            is also the number of steps under way in its pipeline; None means as few as fill the pipeline.
        distance: for ``hetpipe``, the number of waves by which a worker may lack the changes of others; None means 0.
        opportunistic: for ``varuna``, whether a rank takes a forward instead of a backward whose gradient is late;
            None means False.
        lr_rescheduling, discrepancy_correction, warmup_steps: for ``pipemare``, its three techniques. They change what
            a run does with the order, but not the order. None means that it does without.
        replicas: for each stage, the number of ranks that hold it and take its micro-batches in turns; they add up to
            ``ranks``. None means one each.
        shares: for each micro-batch, its share of the samples, in any unit. None means that all have as many.
        target: a user's own schedule, as ``package.module:name``.
        kwargs: further arguments of the target, if it is a function.
        costs: for ``zb_auto`` and ``pipefisher``, the durations from which they find their order.
    """

    ranks: int
    microbatches: int
    chunks: int | None = None
    file: str | None = None
    memory_limit: int | None = None
    costs: Costs | StageCosts = Costs()
    variant: str | None = None
    pipes: int | None = None
    advance: int | None = None
    elasticity: float | None = None
    wave: int | None = None
    distance: int | None = None
    opportunistic: bool | None = None
    base: str | None = None
    lr_rescheduling: int | None = None
    discrepancy_correction: float | None = None
    warmup_steps: int | None = None
    replicas: Sequence[int] | None = None
    shares: Sequence[float] | None = None
    target: str | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Formulas:
    """Closed forms, in Python's notation, for D > 1 equal stages and messages that take no time.

    There are D ranks, T micro-batches and v chunks per rank; r is the rank. F, B, I and W are the durations of a rank's
    whole share. The request has no variant and no pipes.

    Args:
        span: duration of one flushed step.
        bubble_ratio: idle time / total time of all ranks over the span.
        peak_activations: largest number of micro-batches, in units of its whole share, that rank r keeps.
        inner_idle: largest idle time of a rank between its first and its last action. This is what remains of the
            bubble if a step begins before the one before it has ended everywhere.
        when: condition on the durations and T under which all of this holds; ``True`` means always.
    """

    span: str
    bubble_ratio: str
    peak_activations: str
    inner_idle: str
    when: str = "True"


@dataclass(frozen=True, slots=True)
class Legal:
    """The values of one key for which a schedule exists.

    Args:
        rule: a text that can follow "must be".
        holds: takes the number of ranks and a value; returns whether the schedule exists for it.
    """

    rule: str
    holds: Callable[[int, int], bool] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The entry of one schedule.

    Args:
        name: the name, as in ``schedule=NAME``.
        description: a description in one line.
        source: the paper, or another source of the order.
        formulas: closed forms; None if the order is found by search or is the user's own.
        variants: formulas of each variant that ``schedule.variant`` may name; an unset variant is not among them.
        generate: makes the schedule of a request that has no problems.
        default_chunks: default number of model chunks per rank; None if a file or function decides it.
        ranks: the numbers of ranks, D, for which it exists.
        chunks: the numbers of chunks for which it exists.
        microbatches: the numbers of micro-batches, T, for which it exists.
        one_rank: whether it may be used with one rank, where it accumulates gradients.
        constraint: returns the problems of a request that break further rules.
        keys: the fields of a request that it uses, among those that only few schedules use.
        examples: some legal values of these keys; tests draw from them.
        kind: "synchronous" means that every forward and backward of a step reads weights with the updates of all
            earlier steps. "asynchronous" means that windows overlap and some weights lack updates; ``generate`` then
            makes enough windows to show how the schedule repeats.
        prediction: the prediction of weights that belongs to it, by its name; None: none does.
        gaps: the published gaps of this prediction, by their name in :data:`runner.schedule.gaps.PRESETS`; None: as
            many steps as a stage is late.
        convergence: how the survey of pipeline parallelism (Guan et al., 2024) rates it; None: not known here.
        data_unit: the unit of data that goes through the pipeline as one.
        averaged_pipes: the default number of its pipelines if each trains weights of its own; 0: all have the same.
        by_costs: whether its order depends on the costs of the request.
        by_plan: whether a plan chooses the order by the seconds and bytes of the stages.
        searched: whether ``auto`` considers it.
        summary: what it does and what it costs, for the table of docs/schedules.md.
        figures: texts for idle share and micro-batches kept in that table; None means the simulator's figures.
        position: its place in lists, ascending.
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
    examples: Mapping[str, Sequence[object]] = field(default_factory=dict)
    variants: Mapping[str, Formulas] = field(default_factory=dict)
    kind: str = "synchronous"
    prediction: str | None = None
    gaps: str | None = None
    data_unit: str = "micro-batch"
    convergence: str | None = None
    averaged_pipes: int = 0
    by_costs: bool = False
    by_plan: bool = False
    searched: bool = True
    summary: str = ""
    figures: tuple[str, str] | None = None
    position: int = 1000

    @property
    def searched_if_allowed(self) -> bool:
        """Whether ``auto`` considers it where asynchronous orders are allowed: one without further choices."""
        is_plain = not self.keys and self.prediction is None and not self.averaged_pipes
        return self.kind == "asynchronous" and is_plain

    def formulas_of(self, variant: str | None) -> Formulas | None:
        """The formulas of a variant; None means the schedule's own."""
        return self.formulas if variant is None else self.variants[variant]

    def accepts(self, request: ScheduleRequest) -> bool:
        """Whether the schedule exists for a request whose number of chunks is set."""
        ranks, chunks = request.ranks, request.chunks
        return (
            (ranks > 1 or self.one_rank)
            and self.ranks.holds(ranks, ranks)
            and chunks is not None
            and self.chunks.holds(ranks, chunks)
            and self.microbatches.holds(ranks, request.microbatches)
            and not self.constraint(request)
        )
