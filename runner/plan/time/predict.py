"""Predicts the seconds of an optimizer step: the lowered program is played with the seconds of its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from runner.memory.solve.residency import RankTurns
from runner.memory.solve.weight_strategy import WeightPlan
from runner.plan.stages.figures import StageFigures
from runner.plan.time.host import stage_moves
from runner.plan.time.played import played_time
from runner.plan.time.weights import weight_runs
from runner.plan.values import Link, TimePrediction
from runner.profile import ModelProfile
from runner.schedule.simulation.clock import StageCosts
from runner.schedule.values import Program, Schedule

__all__ = ["Swap", "predict_time", "ring_all_reduce_seconds", "stage_costs"]


class Swap(NamedTuple):
    """The weights that are at home in the host's memory, and for each rank when they come to the device."""

    plan: WeightPlan
    turns: tuple[RankTurns, ...]


def predict_time(
    program: Program,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
    *,
    mean_samples: float,
    data: int = 1,
    link: Link | None = None,
    host_link: Link | None = None,
    post_validation: bool = False,
    adjusted: Callable[[StageCosts], StageCosts] | None = None,
    at_once: float | None = None,
    swap: Swap | None = None,
) -> TimePrediction:
    """The time of one optimizer step of one replica's pipeline, from playing what its ranks run. Replicas run alike.

    Args:
        program: one replica's lowered schedule.
        profile: any micro-batch's; its seconds count in proportion to the samples.
        figures: the figures of each stage, from the same profile.
        mean_samples: mean samples of the step's micro-batches.
        data: replicas that reduce gradients, besides the twins of several pipelines.
        link: between two ranks; without one, messages and reductions cost nothing.
        host_link: between a rank and its host's memory, in one direction; without one, moves cost nothing.
        post_validation: whether ranks begin a step while others end the one before; the time is that of one of many.
        adjusted: changes the costs that follow from layers and link by what else is known.
        at_once: number of the pipeline's ranks that can compute at full speed at the same time; None: all of them.
        swap: the weights that are at home in the host's memory, and when they come; None: all stay on the device.
    """
    schedule = program.schedule
    copies = [data * len(schedule.copies_of(stage)) for stage in range(schedule.stages)]
    costs = stage_costs(profile, figures, mean_samples=mean_samples, copies=copies, link=link or Link())
    costs = _with_host(costs, schedule, profile, figures, mean_samples / profile.samples, host_link or Link(), swap)
    costs = _with_exchanges(costs, schedule)
    if adjusted is not None:
        costs = adjusted(costs)
    return played_time(program, costs, profile.seconds_source, post_validation=post_validation, at_once=at_once)


def _with_host(
    costs: StageCosts,
    schedule: Schedule,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
    ratio: float,
    link: Link,
    swap: Swap | None,
) -> StageCosts:
    """The costs with moves over the host's link: of what stages save, in ``ratio`` to the profile's, and of weights."""
    costs = replace(costs, moves=stage_moves(figures, ratio, link))
    if swap is None or not swap.turns:
        return costs
    units = [swap.plan.of(schedule.stages_of(rank)) for rank in range(schedule.ranks)]
    return replace(costs, weights=weight_runs(swap.turns, units, profile, link.seconds))


def _with_exchanges(costs: StageCosts, schedule: Schedule) -> StageCosts:
    """The costs if each rank sums and updates several copies of its weights, or sums once in several steps.

    Drawing the copies together is not counted.
    """
    if (copies := schedule.trained_copies) > 1:
        costs = replace(
            costs,
            reduce=tuple(copies * seconds for seconds in costs.reduce),
            step=tuple(copies * seconds for seconds in costs.step),
        )
    if schedule.wave:
        costs = replace(costs, reduce=tuple(seconds / schedule.wave for seconds in costs.reduce))
    return costs


def stage_costs(
    profile: ModelProfile, figures: Sequence[StageFigures], *, mean_samples: float, copies: Sequence[int], link: Link
) -> StageCosts:
    """The costs for the simulator, in seconds. A recomputation costs as much as a forward.

    Args:
        profile, figures, mean_samples, link: see :func:`predict_time`.
        copies: per stage, the number of ranks that reduce its gradients together.
    """
    ratio = mean_samples / profile.samples
    return StageCosts(
        F=[stage.forward_seconds * ratio for stage in figures],
        B=[stage.backward_seconds * ratio for stage in figures],
        I=[stage.input_gradient_seconds * ratio for stage in figures],
        W=[stage.weight_gradient_seconds * ratio for stage in figures],
        comm=[link.seconds(stage.output_bytes * ratio) for stage in figures[:-1]],
        reduce=[
            ring_all_reduce_seconds(stage.gradient_bytes, ranks, link)
            for stage, ranks in zip(figures, copies, strict=True)
        ],
        step=[stage.gradient_bytes * profile.optimizer_seconds_per_byte for stage in figures],
        fills=_fill_seconds(figures, ratio),
        stash=[link.seconds((stage.saved_bytes + stage.input_bytes) * ratio) for stage in figures],
        occupancy=[link.transfer_seconds(stage.output_bytes * ratio) for stage in figures[:-1]],
    )


def _fill_seconds(figures: Sequence[StageFigures], ratio: float) -> dict[str, list[float]]:
    """Stage by stage, the seconds of each kind of work that fills bubbles; of a kind of micro-batches for one."""
    kinds = {name: per_microbatch for stage in figures for name, per_microbatch in stage.fills.of_microbatch.items()}
    return {
        name: [stage.fills.seconds.get(name, 0.0) * (ratio if per_microbatch else 1.0) for stage in figures]
        for name, per_microbatch in kinds.items()
    }


def ring_all_reduce_seconds(num_bytes: int, copies: int, link: Link) -> float:
    """The seconds of an all-reduce in a ring of R = ``copies`` ranks: 2 (R - 1) messages of 1/R of the bytes each."""
    return 2 * (copies - 1) * link.seconds(num_bytes / copies)
