"""The links of a run, in classes from inside to outside: an island of devices, a node, the network between nodes.

Two ranks use the first class that has a group of which both are members. Ranks are numbered
(pipeline · data + replica) · tensor + part, or (replica · stages + pipeline) · tensor + part where the ranks of a
pipeline are neighbours, and each group of a class has neighbouring ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.config.links import group_size
from runner.config.schema import RunConfig
from runner.plan.values import Link

__all__ = ["LinkClass", "Network", "network_from_json", "network_of", "one_link", "slowest"]


@dataclass(frozen=True, slots=True)
class LinkClass:
    """One kind of link.

    Args:
        link: between two ranks of a group, if nobody else sends. If it is shared, what all ranks together send out of
            a group of the class inside.
        ranks: neighbouring ranks of a group; None: all ranks are one group.
        shared: whether the ranks of a group of the class inside, such as a node, share the bytes per second when they
            send out of it at the same time. The first class has no class inside; it is shared by a whole group.
    """

    link: Link
    ranks: int | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """The links between all ranks.

    Args:
        classes: from inside to outside, each group a whole number of the groups before.
        node: ranks of a node, which share the first class if it is shared and holds all ranks; None: all are on one.
        delay_seconds: latency of the slower link of ``transport``, which each message passes first.
        bytes_per_second: speed of that link; None: it adds no time for bytes.
        pipeline: the places of a pipeline whose ranks are neighbours; None: the replicas of a stage are.
    """

    classes: tuple[LinkClass, ...] = (LinkClass(Link()),)
    node: int | None = None
    delay_seconds: float = 0.0
    bytes_per_second: float | None = None
    pipeline: int | None = None

    @property
    def inside(self) -> Link:
        """The link between neighbours, if nobody else sends."""
        return self._link(0, 1)

    def boundaries(self, rows: Sequence[Sequence[int]], data: int, tensor: int) -> tuple[Link, ...]:
        """The link between each stage and the next one, which all replicas and parts use at about the same time.

        Args:
            rows: for each pipeline of a replica, the place of each stage.
            data: replicas.
            tensor: ranks that divide layers.
        """
        return tuple(
            slowest(self.between(row[stage], row[stage + 1], data, tensor) for row in rows)
            for stage in range(len(rows[0]) - 1)
        )

    def between(self, place: int, other: int, data: int, tensor: int) -> Link:
        """The link from one place in the pipeline to another, if each of the ``data * tensor`` ranks there sends."""
        return self._together(
            (one + part, two + part)
            for one, two in zip(self._ranks(place, data, tensor), self._ranks(other, data, tensor), strict=True)
            for part in range(tensor)
        )

    def emulated(self, rank: int, other: int, ranks: int) -> tuple[float, float | None]:
        """Seconds of latency and bytes per second from one of ``ranks`` to another, if all that share the link send."""
        at = self._class_of(rank, other)
        link = self._link(at, min(self._sharing(at) or ranks, ranks))
        return link.latency_seconds, link.bytes_per_second

    def _ranks(self, place: int, data: int, tensor: int) -> list[int]:
        """The first rank of each replica at a place in the pipeline."""
        if self.pipeline is None:
            return [(place * data + replica) * tensor for replica in range(data)]
        return [(replica * self.pipeline + place) * tensor for replica in range(data)]

    def replicas(self, places: Iterable[int], data: int, tensor: int) -> Link:
        """The slowest link of the rings of a stage's replicas, of which each part of its layers has one.

        Args:
            places: the places in the pipeline of the ranks that have the stage.
            data, tensor: see :meth:`boundaries`.
        """
        ranks = [rank for place in places for rank in self._ranks(place, data, tensor)]
        pairs = [
            (one + part, other + part) for one, other in zip(ranks, ranks[1:], strict=False) for part in range(tensor)
        ]
        return self._together(pairs)

    def parts(self, tensor: int) -> Link:
        """The link between ranks that divide layers: the first class whose groups hold them all, wherever they are.

        If it is shared, all ranks exchange at the same time.
        """
        holding = (at for at, each in enumerate(self.classes) if each.ranks is None or not each.ranks % tensor)
        at = next(holding, len(self.classes) - 1)
        return self._link(at, self._sharing(at) or tensor)

    def levels(self, ranks: int, *, alone: bool = False) -> list[tuple[int, Link]]:
        """For each class from inside to outside, the ranks of a group, and its link if all of them send at once.

        Args:
            ranks: the ranks of the last class. A class whose groups do not divide them, or are no larger than those of
                the class inside, is left out.
            alone: whether one rank of a group sends instead.
        """
        found, inside = list[tuple[int, Link]](), 1
        for at, each in enumerate(self.classes):
            size = ranks if at == len(self.classes) - 1 else min(each.ranks or ranks, ranks)
            if size % inside == 0 and ranks % size == 0 and (size > inside or not found):
                found.append((size, self._link(at, 1 if alone else min(self._sharing(at) or ranks, ranks))))
                inside = size
        return found

    def _together(self, pairs: Iterable[tuple[int, int]]) -> Link:
        """The slowest link of these pairs, if each sends from its first to its second rank at the same time."""
        senders = [Counter[int]() for _ in self.classes]
        for one, other in pairs:
            if one != other:
                at = self._class_of(one, other)
                senders[at][_group(one, self._sharing(at))] += 1
        used = (self._link(at, max(each.values())) for at, each in enumerate(senders) if each)
        return slowest(used, self.inside)

    def _class_of(self, one: int, other: int) -> int:
        met = (at for at, each in enumerate(self.classes) if _group(one, each.ranks) == _group(other, each.ranks))
        return next(met, len(self.classes) - 1)

    def _sharing(self, at: int) -> int | None:
        """The neighbouring ranks that share a class if it is shared; None: all."""
        return self.classes[at - 1].ranks if at else self.classes[0].ranks or self.node

    def _link(self, at: int, senders: int) -> Link:
        """The link of a class for each of so many that send at the same time.

        A rank that has a shared link to itself sends no faster than over the class inside: the rate of a node is that
        of several adapters.
        """
        each = self.classes[at]
        speed = each.link.bytes_per_second
        if each.shared and speed is not None:
            within = self.classes[at - 1].link.bytes_per_second if at else None
            speed = min(speed / senders, within or math.inf)
        return Link(each.link.latency_seconds, speed).slowed(self.delay_seconds, self.bytes_per_second)


def slowest(links: Iterable[Link], default: Link | None = None) -> Link:
    """A link as slow as each of these in both figures; ``default`` if there are none."""
    found = list(links)
    if not found and default is not None:
        return default
    speeds = [each.bytes_per_second for each in found if each.bytes_per_second is not None]
    return Link(max(each.latency_seconds for each in found), min(speeds, default=None))


def network_of(config: RunConfig, link: Link | None = None) -> Network:
    """The network of a request: its ``hardware.links``, or the two classes of the keys that are their short form.

    Args:
        config: the request.
        link: between two neighbours, where it was measured; None: as the request says.
    """
    asked, slower = config.hardware, config.transport
    classes = [
        LinkClass(Link(each.latency_seconds, each.bytes_per_second), group_size(each), each.shared)
        for each in asked.links
    ]
    if not classes:
        classes = [LinkClass(Link(asked.link_latency_seconds, asked.link_bytes_per_second))]
        if asked.devices_per_node is not None and asked.network_bytes_per_second is not None:
            latency = (link or classes[0].link).latency_seconds
            network = LinkClass(Link(latency, asked.network_bytes_per_second), None, shared=True)
            classes = [LinkClass(classes[0].link, asked.devices_per_node), network]
    if link is not None:
        classes[0] = LinkClass(link, classes[0].ranks, classes[0].shared)
    pipeline = config.parallelism.pipeline if config.parallelism.order == "pipeline_inside" else None
    return Network(tuple(classes), asked.devices_per_node, slower.delay_seconds, slower.bytes_per_second, pipeline)


def one_link(link: Link) -> Network:
    """The network in which any two ranks have the same link."""
    return Network((LinkClass(link),))


def network_from_json(document: Mapping[str, Any]) -> Network:
    """The network that ``dataclasses.asdict`` has written."""
    classes = (LinkClass(**{**each, "link": Link(**each["link"])}) for each in document["classes"])
    return Network(**{**document, "classes": tuple(classes)})


def _group(rank: int, ranks: int | None) -> int:
    return 0 if ranks is None else rank // ranks
