"""``planner=pipe_torch``: as PipeDream's, for machines that do not compute and communicate at the same time.

A stage of m replicas takes compute / m for a micro-batch, and to it are added its messages in both directions and its
share of the sum of gradients. The slowest stage is the least, by dynamic programming over layers and devices. Steady
state alone: filling, memory and recomputation are not modelled. Unlike devices are tried in every order, of which a
stage takes neighbours, that share micro-batches evenly and wait for the slowest of them.

Source: Pipe-torch, 2019, as the surveys tell it: a dynamic program without overlap (reconstruction).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from runner.plan.devices import MOST_ORDERS, unlike_orders
from runner.plan.planners.kinds import CUTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, given_microbatches, least_slowest
from runner.plan.planners.values import Device, PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import Numbers

__all__ = ["PLANNER", "in_best_order", "plan", "slowest_alone"]

Shared = tuple[float, Stages, tuple[int, ...]]
"""Seconds of the slowest stage, the stages, and the replicas of each."""


def plan(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem."""
    count = given_microbatches(problem)
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    order: tuple[Device, ...] = ()
    if problem.devices:
        (seconds, stages, replicas), order = in_best_order(chain, problem.devices)
    else:
        seconds, stages, replicas = slowest_alone(chain, problem.ranks)
    ends = np.cumsum(replicas).tolist()
    groups = [order[end - own : end] for end, own in zip(ends, replicas, strict=True)] if order else []
    return answer_of(
        "pipe_torch",
        problem,
        stages,
        replicas=replicas,
        tensor=(1,) * len(stages),
        microbatches=max(1, count // max(replicas)),
        count=count,
        kept=(problem.divisions[0].kept[0].name,) * len(stages),
        seconds=count * seconds,
        needs=_needs(groups),
        devices=tuple(own[0].name for own in groups),
    )


def _needs(groups: Sequence[Sequence[Device]]) -> tuple[str, ...]:
    """What the engine lacks for stages on these devices."""
    if any(len({device.name for device in own}) > 1 for own in groups):
        return ("replicas of a stage have devices of several classes, and all must be of one",)
    if len({len(own) for own in groups}) > 1:
        return ("its stages have different numbers of replicas, which is not planned with unlike devices",)
    return ()


def in_best_order(chain: Chain, devices: Sequence[Device]) -> tuple[Shared, tuple[Device, ...]]:
    """The least seconds of the slowest stage on all devices, and the order in which stages take them."""
    orders = islice(unlike_orders(devices), MOST_ORDERS)
    return min(((_slowest_in(chain, order), order) for order in orders), key=lambda each: each[0][0])


def _slowest_in(chain: Chain, order: Sequence[Device]) -> Shared:
    """The least seconds of the slowest stage, if stages take devices in this order."""
    layers, count = len(chain.problem.layers), len(order)
    slowest = np.ones((count + 1, count + 1))  # of the devices before .. after - 1
    for before in range(count):
        for after in range(before + 1, count + 1):
            slowest[before, after] = min(device.speed for device in order[before:after])
    many = np.maximum(np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None], 1)

    def cost(first: int, end: int) -> Numbers:
        messages = sum(2 * chain.message(at) for at in (first, end) if 0 < at < layers)
        sums = np.array([chain.sum_seconds(first, end, own) for own in range(count + 1)])
        found: Numbers = (chain.seconds(first, end) / slowest + sums[many]) / many + messages
        return found

    return least_slowest(layers, count, cost)


def slowest_alone(chain: Chain, devices: int) -> Shared:
    """The least seconds of the slowest stage with all that it sends, on exactly so many devices; with its stages."""
    layers, many = len(chain.problem.layers), np.maximum(np.arange(devices + 1), 1)

    def cost(first: int, end: int) -> Numbers:
        messages = sum(2 * chain.message(at) for at in (first, end) if 0 < at < layers)
        sums = np.array([chain.sum_seconds(first, end, int(own)) for own in many])
        found: Numbers = (chain.seconds(first, end) + sums) / many + messages
        return found

    return least_slowest(layers, devices, cost)


PLANNER = PlannerKind(
    name="pipe_torch",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
    ),
    chooses="cut, replicas of each stage",
    by="dynamic program without overlap",
    lacks="filling the pipeline, memory",
    position=100,
)
