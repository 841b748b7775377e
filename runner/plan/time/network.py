"""The links of a run on several nodes: neighbours of a node have its own link, others share the network of a node.

Ranks are numbered (pipeline · data + replica) · tensor + part, and a node has ``devices_per_node`` neighbouring ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.config.schema import RunConfig
from runner.plan.values import Link

__all__ = ["Network", "network_of"]


@dataclass(frozen=True, slots=True)
class Network:
    """The links between all ranks.

    Args:
        link: between two ranks of a node.
        per_node: ranks of a node; None: all ranks are on one.
        bytes_per_second: out of a node, of all its ranks together; None: as fast as ``link``.
    """

    link: Link
    per_node: int | None = None
    bytes_per_second: float | None = None

    def boundaries(self, rows: Sequence[Sequence[int]], data: int, tensor: int) -> tuple[Link, ...]:
        """The link between each stage and the next one, which all replicas and parts use at about the same time.

        Args:
            rows: for each pipeline of a replica, the place of each stage.
            data: replicas.
            tensor: ranks that divide layers.
        """
        columns = data * tensor
        return tuple(
            min(
                (self._together(_pairs(row[stage], row[stage + 1], columns)) for row in rows),
                key=lambda each: each.bytes_per_second or float("inf"),
            )
            for stage in range(len(rows[0]) - 1)
        )

    def replicas(self, places: Iterable[int], data: int, tensor: int) -> Link:
        """The slowest link of the rings of a stage's replicas, of which each part of its layers has one.

        Args:
            places: the places in the pipeline of the ranks that have the stage.
            data, tensor: see :meth:`boundaries`.
        """
        ranks = [(place * data + replica) * tensor for place in places for replica in range(data)]
        pairs = [
            (one + part, other + part) for one, other in zip(ranks, ranks[1:], strict=False) for part in range(tensor)
        ]
        return self._together(pairs)

    def _together(self, pairs: Iterable[tuple[int, int]]) -> Link:
        """The link of these pairs, if each sends from its first to its second rank at the same time."""
        if self.per_node is None or self.bytes_per_second is None:
            return self.link
        nodes = [(one // self.per_node, other // self.per_node) for one, other in pairs]
        senders = Counter(one for one, other in nodes if one != other)
        if not senders:
            return self.link
        share = self.bytes_per_second / max(senders.values())
        return Link(self.link.latency_seconds, min(share, self.link.bytes_per_second or share))


def network_of(config: RunConfig, link: Link) -> Network:
    """The network of a request.

    Args:
        config: the request.
        link: between two ranks of a node.
    """
    return Network(link, config.hardware.devices_per_node, config.hardware.network_bytes_per_second)


def _pairs(place: int, other: int, columns: int) -> Iterable[tuple[int, int]]:
    return ((place * columns + column, other * columns + column) for column in range(columns))
