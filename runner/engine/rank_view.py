"""The place of a rank in its pipeline and among its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from runner.plan.layout.topology import Topology

__all__ = ["RankView"]


@dataclass(frozen=True)
class RankView:
    """The place of a rank in its pipeline and among its replicas.

    Args:
        position: its position in its pipeline.
        pipeline: the global rank at each position of this rank's pipeline.
        replicas: the global ranks that hold the same stages at the same position, in replica order.
        shards: the global ranks that divide this rank's layers with it, in their order; this one alone if none does.
        peers: the global ranks at this position of all pipelines: the replicas of all shards.
        judges: the global ranks of this replica, of all positions and shards, which share a verdict.
        num_stages: number of stages of the model.
        first_microbatch: the global number of this replica's first micro-batch: d * T.
        holders: for each of this rank's stages, all global ranks with a copy: replicas, and the twins of pipelines
            that cross. Their gradients are summed, in this order.
        later_copies: this rank's stages whose first copy is on another rank of its pipeline; the consequences for each
            parameter are in its tag, see :class:`runner.model.tags.ParameterTag`.
    """

    position: int
    pipeline: tuple[int, ...]
    replicas: tuple[int, ...]
    shards: tuple[int, ...]
    peers: tuple[int, ...]
    judges: tuple[int, ...]
    num_stages: int
    first_microbatch: int
    holders: Mapping[int, tuple[int, ...]]
    later_copies: frozenset[int] = frozenset()

    @classmethod
    def of(cls, topology: Topology, rank: int, *, microbatches: int) -> Self:
        """The view of ``rank`` in a topology; ``microbatches`` is the number of one replica's micro-batches."""
        place, stages = topology.coordinates(rank), topology.stages_of(rank)
        return cls(
            position=place.pipe,
            pipeline=topology.pipeline_group(place.data, place.tensor),
            replicas=topology.data_group(place.pipe, place.tensor),
            shards=topology.tensor_group(place.pipe, place.data),
            peers=topology.peers(place.pipe),
            judges=topology.model_group(place.data),
            num_stages=topology.num_stages,
            first_microbatch=place.data * microbatches,
            holders={stage: topology.holders(stage, place.tensor) for stage in stages},
            later_copies=frozenset(
                stage for stage in stages if topology.rank_of(stage, place.data, place.tensor, row=0) != rank
            ),
        )

    @property
    def is_first_shard(self) -> bool:
        """Whether this rank is the first one of those that divide its layers."""
        return not self.shards or self.shards[0] == self.pipeline[self.position]

    @property
    def has_twins(self) -> bool:
        """Whether several ranks of this rank's pipeline hold one of its stages."""
        return any(len(ranks) > len(self.replicas) for ranks in self.holders.values())
