from __future__ import annotations

import inspect
import itertools

import pytest

from runner.plan.layout.topology import Coordinates, Seat, Topology


@pytest.mark.parametrize(("pipeline", "data", "tensor"), [*itertools.product((1, 2, 3, 5), (1, 2, 4), (1, 2))])
def test_grid_follows_the_rank_formula(pipeline: int, data: int, tensor: int) -> None:
    topology = Topology.grid(pipeline, data, tensor)
    assert topology.world_size == pipeline * data * tensor
    assert topology.num_stages == topology.num_positions == pipeline
    assert topology.num_replicas == data
    for pipe, d, t in itertools.product(range(pipeline), range(data), range(tensor)):
        rank = (pipe * data + d) * tensor + t
        assert topology.coordinates(rank) == Coordinates(pipe, d, t)
        assert topology.rank_of(pipe, d, t, row=0) == rank
        assert topology.stages_of(rank) == (pipe,)
        assert topology.pipeline_group(d, t)[pipe] == rank
        assert topology.data_group(pipe, t)[d] == rank


def test_neighbours_are_the_stages_before_and_after_in_the_same_replica() -> None:
    topology = Topology.grid(3, 2)
    assert topology.neighbours(0) == (2,)
    assert topology.neighbours(3) == (1, 5)
    assert Topology.grid(1, 4).neighbours(2) == ()


def test_looping_placement_puts_two_stages_on_a_rank_and_closes_the_ring() -> None:
    topology = Topology.grid(3, 2, placement=[[0, 1, 2, 0, 1, 2]])
    assert topology.stages_of(2) == (1, 4)
    assert topology.neighbours(0) == (2, 4)
    assert topology.num_stages == 6
    assert topology.holders(4, 0) == (2, 3)


def test_two_rows_make_twins() -> None:
    topology = Topology.grid(2, 1, placement=[[0, 1], [1, 0]])
    assert topology.holders(0, 0) == (0, 1)
    assert topology.stages_of(0) == (0, 1)
    assert [seat.row for seat in topology.seats_of(0)] == [0, 1]
    assert topology.rank_of(0, 0, 0, row=1) == 1


def test_a_table_may_replicate_one_stage_alone() -> None:
    topology = Topology((Seat(0, 0, 0, 0, 0), Seat(0, 0, 1, 0, 1), Seat(0, 1, 0, 0, 2)))
    assert topology.world_size == 3
    assert topology.holders(0, 0) == (0, 1)
    assert topology.holders(1, 0) == (2,)


def test_tables_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="given twice"):
        Topology((Seat(0, 0, 0, 0, 0), Seat(0, 0, 0, 0, 1)))
    with pytest.raises(ValueError, match="without gaps"):
        Topology((Seat(0, 0, 0, 0, 0), Seat(0, 1, 0, 0, 2)))
    with pytest.raises(ValueError, match="at least 1"):
        Topology.grid(2, 0)
    with pytest.raises(ValueError, match="pipe positions"):
        Topology.grid(2, 1, placement=[[0, 0]])


def test_whoever_asks_says_which_shard() -> None:
    """Where layers are divided, the ranks of the first shard are nobody's default."""
    methods = (each for name, each in vars(Topology).items() if inspect.isfunction(each) and name[0] != "_")
    asked = [inspect.signature(each).parameters for each in methods]
    places = {name for each in asked for name, one in each.items() if name != "self" and one.default is not one.empty}
    assert places == set()
    assert any("shard" in each for each in asked)
