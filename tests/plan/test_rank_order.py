"""Ranks may be numbered so that the stages of a replica are neighbours, or so that the replicas of a stage are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from runner.plan.layout.topology import Topology
from runner.plan.time.network import LinkClass, Network
from runner.plan.values import Link

_NEAR, _FAR = Link(1e-6, 900.0), Link(1e-4, 90.0)


@pytest.mark.parametrize(("pipeline", "data", "tensor"), [(2, 3, 1), (3, 2, 2), (4, 4, 1)])
def test_every_rank_has_one_place_and_stages_are_neighbours(pipeline: int, data: int, tensor: int) -> None:
    topology = Topology.grid(pipeline, data, tensor, pipeline_inside=True)
    found = [topology.coordinates(rank) for rank in range(topology.world_size)]
    expected = itertools.product(range(data), range(pipeline), range(tensor))
    assert [(each.data, each.pipe, each.tensor) for each in found] == list(expected)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("pipeline", "data", "tensor", "node"), [(2, 2, 1, 2), (2, 4, 2, 4), (4, 2, 1, 4), (3, 2, 2, 6)]
)
def test_links_are_those_of_the_ranks(pipeline: int, data: int, tensor: int, node: int, inside: bool) -> None:
    """The slowest link between any two ranks that talk, by their places in the topology."""
    network = Network((LinkClass(_NEAR, node), LinkClass(_FAR)))
    network = replace(network, pipeline=pipeline) if inside else network
    topology = Topology.grid(pipeline, data, tensor, pipeline_inside=inside)

    def slowest(pairs: list[tuple[int, int]]) -> Link:
        return _FAR if any(one // node != other // node for one, other in pairs) else _NEAR

    for stage in range(pipeline - 1):
        groups = [topology.pipeline_group(replica, part) for replica in range(data) for part in range(tensor)]
        pairs = [(group[stage], group[stage + 1]) for group in groups]
        assert network.boundaries([range(pipeline)], data, tensor)[stage] == slowest(pairs)
    for place in range(pipeline):
        groups = [topology.data_group(place, part) for part in range(tensor)]
        pairs = [pair for group in groups for pair in itertools.pairwise(group)]
        assert network.replicas([place], data, tensor) == slowest(pairs)
