"""The entry of a schedule in the catalogue: its formulas and limits, and the request that it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.errors import Problem
from runner.options import Option
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
        options: the keys that only some schedules read, by name, as far as they are given. What each means stands in
            the entries of its schedules: :attr:`ScheduleSpec.options`.
        target: a user's own schedule, as ``package.module:name``.
        kwargs: further arguments of the target, if it is a function.
        costs: for schedules whose order depends on them, the durations from which they find it.
    """

    ranks: int
    microbatches: int
    chunks: int | None = None
    costs: Costs | StageCosts = Costs()
    options: Mapping[str, Any] = field(default_factory=dict)
    target: str | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def option(self, key: str) -> Any:
        """The value of an option; None where it is not given."""
        return self.options.get(key)


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
        options: the keys of the section ``schedule`` that it reads, among those that only some schedules read.
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
    options: tuple[Option, ...] = ()
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
    def keys(self) -> frozenset[str]:
        """The names of its options."""
        return frozenset(option.key for option in self.options)

    @property
    def searched_if_allowed(self) -> bool:
        """Whether ``auto`` considers it where asynchronous orders are allowed: one without further choices."""
        is_plain = not self.options and self.prediction is None and not self.averaged_pipes
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
