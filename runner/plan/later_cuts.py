"""Plans a run whose layers move between stages: each cut as a request of its own, and what a move needs.

The schedule and its program do not depend on the cut. A rank's peak is the most over the cuts and over the moves. While
layers move, it holds the weights and the optimizer states of its stages before, and those of the layers that come;
gradients have no memory then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from runner.config.schema import PartitionConfig, RunConfig
from runner.errors import Problem, raise_problems
from runner.memory.solve.values import StageProgram
from runner.plan.cut.values import Partition
from runner.plan.values import MemoryParts, MemoryPrediction, RunPlan

__all__ = ["arriving", "held_in_moves", "with_cut", "with_later_cuts"]


def with_later_cuts(plan: RunPlan, config: RunConfig, planned: Callable[[RunConfig], RunPlan]) -> RunPlan:
    """The plan with those of the cuts that the request names by step, and the memory of all of them.

    Args:
        plan: the plan of the first cut.
        config: the request.
        planned: plans a request in the schedule of the plan.

    Raises:
        RequestError: a cut cannot be trained, or a layer that moves shares a weight with another one.
    """
    later = tuple(
        (step, planned(with_cut(config, boundaries)))
        for step, boundaries in sorted((config.partition.migrate or {}).items())
    )
    if not later:
        return plan
    cuts = [plan, *(each for _, each in later)]
    raise_problems(_problems(config, cuts))
    moving = held_in_moves(cuts, copies=config.checkpoint.asynchronous)
    memory = _most([*(each.memory for each in cuts), *moving], cuts[-1].memory)
    return replace(plan, memory=memory, cuts=((0, plan), *later))


def arriving(before: Partition, after: Partition, placement: Sequence[int], position: int) -> tuple[int, ...]:
    """The layers that a position of the pipeline has after a move, and not before it.

    Args:
        before, after: first and last layer of each stage, inclusive.
        placement: the position of each stage.
        position: the position.
    """
    old, new = (
        {
            layer
            for stage, (first, last) in enumerate(cut)
            if placement[stage] == position
            for layer in range(first, last + 1)
        }
        for cut in (before, after)
    )
    return tuple(sorted(new - old))


def held_in_moves(cuts: Sequence[RunPlan], *, copies: bool) -> list[MemoryPrediction]:
    """What ranks hold while layers move from each cut to the next one.

    Args:
        cuts: the plans of the cuts, in order.
        copies: whether there may be copies from which a checkpoint is written meanwhile.
    """
    return [_moving(*pair, copies=copies) for pair in pairwise(cuts)]


def with_cut(config: RunConfig, boundaries: list[int]) -> RunConfig:
    """The request with one cut, which stays.

    Args:
        config: the request.
        boundaries: the first layer of each stage but the first.
    """
    changed = copy.copy(config)
    changed.partition = PartitionConfig("manual", boundaries=boundaries)
    return changed


def _problems(config: RunConfig, cuts: Sequence[RunPlan]) -> Iterator[Problem]:
    """Weights that several layers use, of which one moves: the ranks that sum their gradients would be others."""
    placement = cuts[0].schedule.placement[0]
    moving = {
        layer
        for before, after in zip(cuts, cuts[1:], strict=False)
        for position in set(placement)
        for layer in arriving(before.partition, after.partition, placement, position)
    }
    for weight in cuts[0].profile.shared:
        moved = moving.intersection(weight.layers)
        if moved:
            rule = f"must not move layer {min(moved)}"
            why = f"Layers {', '.join(map(str, weight.layers))} share a weight, whose gradients their ranks sum"
            yield Problem("partition.migrate", config.partition.migrate, rule, why, "partition.migrate=null")
    decided = next((each for cut in cuts for each in cut.activations.stages if isinstance(each, StageProgram)), None)
    if decided is not None or cuts[0].prediction is not None:
        path = "weight_prediction" if decided is None else "activation_checkpoint"
        asked = config.weight_prediction.name if decided is None else config.activation_checkpoint.name
        why = "It keeps tensors of a stage, or decides about them, from step to step"
        yield Problem(path, asked, "must be none with partition.migrate", why, f"{path}=none")
    if any(each.schedule != cuts[0].schedule for each in cuts):
        rule, why = "must leave the schedule as it is", f"The order of {cuts[0].schedule.name} depends on the cut"
        yield Problem("partition.migrate", config.partition.migrate, rule, why, "schedule=1f1b")


def _moving(before: RunPlan, after: RunPlan, *, copies: bool) -> MemoryPrediction:
    """:func:`held_in_moves` of one move."""
    placement = before.schedule.placement[0]
    parts = []
    for position, (own, then) in enumerate(zip(before.memory.states, after.memory.states, strict=True)):
        layers = arriving(before.partition, after.partition, placement, position)
        coming = [after.profile.layers[layer] for layer in layers]
        weights = sum(row.weight_bytes for row in coming)
        trained = sum(
            after.profile.layers[layer].gradient_bytes
            for stage, (first, last) in enumerate(after.partition)
            if placement[stage] == position
            for layer in range(first, last + 1)
        )
        share = sum(row.gradient_bytes for row in coming) / trained if trained else 0.0
        states = own.optimizer + round(then.optimizer * share)
        buffers = before.memory.parts[position].buffers if copies else own.buffers
        parts.append(MemoryParts(own.weights + weights, 0, states, 0, buffers))
    return MemoryPrediction(tuple(parts))


def _most(parts: Sequence[MemoryPrediction], last: MemoryPrediction) -> MemoryPrediction:
    """The memory whose peak is the largest, for each position and replica; states are those of the last cut."""
    replicas = max(len(each.of_replicas[0]) if each.of_replicas else 0 for each in parts)
    rows = [each.of_replicas or tuple((one,) * replicas for one in each.parts) for each in parts] if replicas else []
    return replace(
        last,
        parts=tuple(max(each, key=lambda one: one.total) for each in zip(*(one.parts for one in parts), strict=True)),
        of_replicas=tuple(
            tuple(max(each, key=lambda one: one.total) for each in zip(*of_position, strict=True))
            for of_position in zip(*rows, strict=True)
        ),
    )
