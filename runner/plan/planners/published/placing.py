"""Where the replicas of a stage are, if the links inside nodes are others than those between nodes: for DAPPLE.

A place is the number of a stage's devices on each node, as the devices of a node are alike. There are three ways to
place devices: on nodes that nobody uses yet (fresh first), on nodes that are used in part (append first), or one on
each node in turn (scatter first). The public planner takes the nodes by their numbers. Here each way is also looked at
from the nodes of the stage before on, so that a stage may follow another one within a node that does not have the
lowest number.

Source: Fan et al. 2021, DAPPLE, and its public planner's form (reconstruction).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from runner.plan.planners.published.chain import Chain, Stages
from runner.plan.time.network import Network
from runner.plan.values import Link
from runner.schedule.simulation.batched import Numbers

__all__ = ["Nodes", "Place", "Placing", "nodes_of"]

Place: TypeAlias = tuple[int, ...]
"""The devices on each node."""


@dataclass(frozen=True)
class Nodes:
    """Equal nodes and their links.

    Args:
        count: the number of nodes.
        devices: the devices of each.
        inside: between two devices of a node.
        between: between two nodes, whose devices share it.
    """

    count: int
    devices: int
    inside: Link
    between: Link

    @cached_property
    def _found(self) -> dict[tuple[Place, frozenset[int], int], tuple[Place, ...]]:
        return {}

    @cached_property
    def empty(self) -> Place:
        """No device of any node."""
        return (0,) * self.count

    def elsewhere(self, sender: Sequence[float], receiver: Place) -> float:
        """Which part of a message comes over the network.

        To one node alone this is what senders on other nodes have; to several nodes all of it is sent so.

        Args:
            sender, receiver: the places of the two stages; that of the sender may be in any unit.
        """
        nodes = [node for node, own in enumerate(receiver) if own]
        return 1.0 if len(nodes) > 1 else 1 - sender[nodes[0]] / sum(sender)

    def message_seconds(self, size: float, elsewhere: float, aside: int) -> float:
        """Seconds of a micro-batch's message from one stage to another.

        Args:
            size: bytes of the message of one pipeline.
            elsewhere: the part that comes over the network.
            aside: the pipelines that send over the network at the same time.
        """
        return self.between.seconds(size * aside * elsewhere) if elsewhere else self.inside.seconds(size)

    def sum_seconds(self, size: float, place: Place) -> float:
        """Seconds of the sum of so many bytes in a ring over all devices of a place."""
        devices = sum(place)
        link = self.between if sum(own > 0 for own in place) > 1 else self.inside
        return 2 * (devices - 1) * link.seconds(size / devices) if devices > 1 else 0.0

    def in_order(self, devices: Iterable[int]) -> tuple[Place, ...]:
        """The places of stages with so many devices each, which are neighbours."""
        ends = list(accumulate(devices, initial=0))
        return tuple(self._place(range(first, end)) for first, end in pairwise(ends))

    def _place(self, devices: Iterable[int]) -> Place:
        found = [0] * self.count
        for device in devices:
            found[device // self.devices] += 1
        return tuple(found)

    def places(self, used: Place, before: Sequence[float], need: int) -> tuple[Place, ...]:
        """Where so many devices may be.

        Args:
            used: the devices that have a stage.
            before: the place of the stage before, in any unit; empty: there is none.
            need: devices of the next stage.
        """
        last = frozenset(node for node, own in enumerate(before) if own)
        if (found := self._found.get((used, last, need))) is None:
            found = self._found[used, last, need] = self._places(used, last, need)
        return found

    def _places(self, used: Place, last: Collection[int], need: int) -> tuple[Place, ...]:
        by_number = range(self.count)
        found = set[Place]()
        for order in (by_number, sorted(by_number, key=lambda node: node not in last)):
            fresh = [node for node in order if not used[node]]
            partly = [node for node in order if 0 < used[node] < self.devices]
            for nodes, each in ((fresh, self.devices), (partly, self.devices), (list(order), 1)):
                if (place := self._filled(used, nodes, need, each)) is not None:
                    found.add(place)
        return tuple(sorted(found))

    def _filled(self, used: Place, nodes: Sequence[int], need: int, each: int) -> Place | None:
        """So many devices on these nodes, at most ``each`` of a node in each round; None if there are too few."""
        place = [0] * self.count
        while need:
            taken = 0
            for node in nodes:
                more = min(each, need - taken, self.devices - used[node] - place[node])
                place[node] += more
                taken += more
            if not taken:
                return None
            need -= taken
        return tuple(place)


def nodes_of(network: Network, ranks: int) -> Nodes:
    """The nodes of so many ranks: the groups of the last class of links but one, or one node if there is one class."""
    *inner, (_, between) = network.levels(ranks, alone=True)
    devices, inside = inner[-1] if inner else (ranks, between)
    return Nodes(ranks // devices, devices, inside, between)


class _Known:
    """The least slowest stage or message of some stages by the layers that they have, and where it came from."""

    def __init__(self, layers: int) -> None:
        self.seconds: Numbers = np.full(layers + 1, np.inf)
        self.came: list[tuple[_State, int, Place] | None] = [None] * (layers + 1)


_State: TypeAlias = tuple[int, Place, tuple[float, ...]]
"""The number of stages, their devices on each node, and which part of the last one's is on each node."""


@dataclass
class Placing:
    """The least slowest stage or message by the number of stages, over cuts, replicas and places.

    Args:
        chain: the layers.
        nodes: the nodes, all of whose devices are used.
        devices: the devices of each of the pipelines that are side by side.
        aside: the number of these pipelines.
        stages: the most stages.
        alone: whether each stage has one device of a pipeline; else any number.
        in_order: whether replicas are neighbours; else they are placed in all ways of :meth:`Nodes.places`.
        most: seconds above which nothing is looked for, by the number of stages.
        work: the most pairs of stages and places of the next one that are looked at.
    """

    chain: Chain
    nodes: Nodes
    devices: int
    aside: int
    stages: int
    alone: bool = False
    in_order: bool = False
    most: Mapping[int, float] = field(default_factory=dict)
    work: int = 10**9

    def __post_init__(self) -> None:
        self._layers = len(self.chain.problem.layers)
        self._seconds = self.chain.ranges("forward") + self.chain.ranges("backward")
        self._sizes = [self.chain.message_bytes(end) if end else 0.0 for end in range(self._layers + 1)]
        self._sent: dict[float, Numbers] = {}
        start: _State = (0, self.nodes.empty, ())
        self._known = {start: _Known(self._layers)}
        self._known[start].seconds[0] = 0.0

    def search(self) -> dict[int, tuple[float, Stages, tuple[Place, ...]]]:
        """The seconds, the stages and the places for each number of stages for which there are any."""
        states = list(self._known)
        while states and self.work > 0:
            states = self._one_more(states)
        found = dict[int, tuple[float, Stages, tuple[Place, ...]]]()
        for state, known in self._known.items():
            seconds, count = float(known.seconds[-1]), state[0]
            if np.isfinite(seconds) and (count not in found or seconds < found[count][0]):
                found[count] = seconds, *self._walked(state)
        return found

    def _one_more(self, states: Sequence[_State]) -> list[_State]:
        """The states with a stage more that are not complete."""
        made = dict[_State, None]()
        for state in states:
            count, used, _ = state
            left = self.devices - sum(used) // self.aside
            # All that are left, as the last stage, or fewer, if others may follow
            sizes = range(1, left + 1) if count + 1 < self.stages else [left]
            for own in (each for each in sizes if each == 1 or not self.alone):
                for place in self._places(state, own * self.aside):
                    self.work -= 1
                    after = self._after(state, own, place, is_last=own == left)
                    if after is not None and own < left:
                        made[after] = None
        return list(made)

    def _places(self, state: _State, need: int) -> Sequence[Place]:
        if self.in_order:
            return [self.nodes.in_order([sum(state[1]), need])[1]]
        return self.nodes.places(state[1], state[2], need)

    def _after(self, state: _State, own: int, place: Place, *, is_last: bool) -> _State | None:
        """The state after a stage on so many devices of a pipeline; None if it takes too long with any layers."""
        entering = self._known[state].seconds
        if state[0]:
            entering = np.maximum(entering, self._messages(self.nodes.elsewhere(state[2], place)))
        ends = [self._layers] if is_last else list(range(self._layers))
        worst = np.maximum(entering[:, None], self._seconds[:, ends] / own)
        firsts = worst.argmin(axis=0)
        least = worst[firsts, np.arange(len(ends))]
        count = state[0] + 1
        bound = self.most.get(count, np.inf) if is_last else max(self.most.values(), default=np.inf)
        least[least > bound] = np.inf
        if not np.isfinite(least).any():
            return None
        total = sum(place)
        after = (
            count,
            tuple(one + more for one, more in zip(state[1], place, strict=True)),
            tuple(each / total for each in place),
        )
        known = self._known.setdefault(after, _Known(self._layers))
        for at in np.flatnonzero(least < known.seconds[ends]).tolist():
            known.seconds[ends[at]], known.came[ends[at]] = least[at], (state, int(firsts[at]), place)
        return after

    def _messages(self, elsewhere: float) -> Numbers:
        """Seconds there and back of the message after the layers before each end."""
        if elsewhere not in self._sent:
            each = (2 * self.nodes.message_seconds(size, elsewhere, self.aside) for size in self._sizes)
            self._sent[elsewhere] = np.array(list(each))
        return self._sent[elsewhere]

    def _walked(self, state: _State) -> tuple[Stages, tuple[Place, ...]]:
        stages, places, end = list[tuple[int, int]](), list[Place](), self._layers
        while (came := self._known[state].came[end]) is not None:
            state, first, place = came
            stages.insert(0, (first, end - 1))
            places.insert(0, place)
            end = first
        return tuple(stages), tuple(places)
