"""The groups in which ranks that divide layers, replicas and pipelines exchange what they must."""

from __future__ import annotations

import itertools

from runner.engine.rank_view import RankView
from runner.plan.layout.topology import Topology


def test_each_rank_knows_its_groups_in_three_dimensions() -> None:
    """rank = (position x replicas + replica) x parts + part, for 2 positions, 3 replicas and 2 parts."""
    topology = Topology.grid(2, 3, 2)
    for position, replica, part in itertools.product(range(2), range(3), range(2)):
        rank = (position * 3 + replica) * 2 + part
        view = RankView.of(topology, rank, microbatches=4)
        assert view.pipeline == tuple((at * 3 + replica) * 2 + part for at in range(2))
        assert view.replicas == tuple((position * 3 + at) * 2 + part for at in range(3))
        assert view.shards == tuple((position * 3 + replica) * 2 + at for at in range(2))
        assert view.peers == tuple(range(position * 6, position * 6 + 6))
        assert view.judges == tuple(sorted((at * 3 + replica) * 2 + each for at in range(2) for each in range(2)))
        assert view.holders == {position: view.replicas}
        assert view.is_first_shard == (part == 0)
        assert view.first_microbatch == 4 * replica


def test_without_parts_a_rank_is_its_own_group() -> None:
    view = RankView.of(Topology.grid(2, 2), 3, microbatches=1)
    assert (view.shards, view.peers, view.judges) == ((3,), (2, 3), (1, 3))
    assert view.is_first_shard
