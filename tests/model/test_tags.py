"""What each parameter of a rank is, for the ways in which ranks come to hold one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from small_models import Unembed
from torch import nn

from runner.engine.rank_view import RankView
from runner.engine.update.gradients import StageGradients
from runner.engine.update.sets import stage_sets, tied_sets
from runner.model.layers import StageModule, build_stage, layers_of
from runner.model.tags import ParameterTag, holder_groups, named_parameters, tags_of, tied_names
from runner.model.ties import find_ties
from runner.plan.layout.topology import Topology

Tags = dict[str, ParameterTag]
ONE_LAYER_EACH = [(0, 0), (1, 1), (2, 2), (3, 3)]
DOWN, UP, V = (0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 1, 0)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))


def tied() -> nn.Sequential:
    """The last layer uses the first one's weight, the third one the whole second one."""
    embedding, block = nn.Embedding(5, 2), nn.Linear(2, 2)
    embedding.weight = weight = nn.Parameter(torch.zeros(5, 2))
    return nn.Sequential(embedding, block, block, Unembed(weight))


def on_all_ranks(
    model: nn.Sequential,
    partition: Sequence[tuple[int, int]] = ONE_LAYER_EACH,
    rows: Sequence[Sequence[int]] = (DOWN,),
    replicas: int = 1,
) -> list[tuple[dict[int, StageModule], Tags]]:
    """Each rank's stages and tags; rank = position * replicas + replica."""
    sources = layers_of(model, 0)
    ties = find_ties(sources)
    pipeline = 1 + max(max(row) for row in rows)
    topology = Topology.grid(pipeline, replicas, placement=tuple(tuple(row) for row in rows))
    found = []
    for rank in range(topology.world_size):
        stages = {stage: build_stage(sources, *partition[stage]) for stage in topology.stages_of(rank)}
        later = RankView.of(topology, rank, microbatches=1).later_copies
        holders = partial(topology.holders, shard=0)
        tags = tags_of(stages, ties=ties, partition=partition, ranks_of_stage=holders, later_copies=later)
        found.append((stages, tags))
    return found


def tags_on(ranks: Sequence[tuple[dict[int, StageModule], Tags]], name: str) -> dict[int, ParameterTag]:
    """The tags of one parameter by the rank that holds it."""
    return {rank: tags[name] for rank, (_, tags) in enumerate(ranks) if name in tags}


def test_a_plain_stage() -> None:
    ranks = on_all_ranks(plain())
    assert [list(tags) for _, tags in ranks] == [[f"{n}.weight", f"{n}.bias"] for n in range(4)]
    (tag,) = tags_on(ranks, "2.weight").values()
    assert tag == ParameterTag("2.weight", ("2.weight",), (2,), (2,), is_first_copy=True, is_trained=True)
    assert not tag.is_tied
    assert not tag.spans_stages


def test_replicas_are_summed_over_and_each_pipeline_counts_its_own() -> None:
    found = tags_on(on_all_ranks(plain(), replicas=2), "1.bias")
    assert {rank: (tag.holders, tag.is_first_copy) for rank, tag in found.items()} == {
        2: ((2, 3), True),
        3: ((2, 3), True),
    }


def test_a_weight_of_two_stages_counts_where_the_first_one_is() -> None:
    found = tags_on(on_all_ranks(tied(), replicas=2), "0.weight")
    assert {rank: tag.is_first_copy for rank, tag in found.items()} == {0: True, 1: True, 6: False, 7: False}
    for tag in found.values():
        assert tag.names == ("0.weight", "3.weight")
        assert tag.stages == (0, 3)
        assert tag.holders == (0, 1, 6, 7)
        assert tag.is_tied
        assert tag.spans_stages


def test_a_weight_that_is_tied_within_one_stage_is_that_stages_own() -> None:
    (_, tags), _ = on_all_ranks(tied(), [(0, 2), (3, 3)], [(0, 1)])
    assert tags["1.weight"] == ParameterTag("1.weight", ("1.weight", "2.weight"), (0,), (0,), True, True)
    assert tied_names(tags) == {"0.weight", "1.weight", "1.bias"}


def test_a_weight_whose_two_stages_meet_on_one_rank() -> None:
    ranks = on_all_ranks(tied(), rows=[V])
    assert {rank: tag.holders for rank, tag in tags_on(ranks, "0.weight").items()} == {0: (0,)}
    assert {rank: tag.stages for rank, tag in tags_on(ranks, "1.weight").items()} == {1: (1, 2)}


def test_of_twins_the_first_rows_counts() -> None:
    found = tags_on(on_all_ranks(plain(), rows=[DOWN, UP]), "0.weight")
    assert {rank: (tag.holders, tag.is_first_copy) for rank, tag in found.items()} == {
        0: ((0, 3), True),
        3: ((0, 3), False),
    }


def test_a_frozen_parameter_is_held_and_saved_but_not_trained() -> None:
    model = plain()
    model[1].weight.requires_grad_(False)
    ranks = on_all_ranks(model)
    (frozen,), (trained,) = tags_on(ranks, "1.weight").values(), tags_on(ranks, "1.bias").values()
    assert (frozen.is_trained, frozen.is_first_copy) == (False, True)
    assert trained.is_trained
    stages, tags = ranks[1]
    assert stage_sets(stages, tags, StageGradients)[1].names == ["1.bias"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rows", [[DOWN], [V], [DOWN, UP]], ids=["down", "v", "twins"])
@pytest.mark.parametrize("make", [plain, tied])
def test_each_parameter_has_one_first_copy_in_each_pipeline(
    make: type[nn.Sequential], rows: list[tuple[int, ...]], replicas: int
) -> None:
    model = make()
    ranks = on_all_ranks(model, rows=rows, replicas=replicas)
    for replica in range(replicas):
        first = [name for _, tags in ranks[replica::replicas] for name, tag in tags.items() if tag.is_first_copy]
        assert sorted(first) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("rows", [[DOWN], [V], [DOWN, UP]], ids=["down", "v", "twins"])
def test_holders_are_the_ranks_that_have_a_tag(rows: list[tuple[int, ...]]) -> None:
    ranks = on_all_ranks(tied(), rows=rows, replicas=2)
    for name in ("0.weight", "1.weight", "1.bias"):
        found = tags_on(ranks, name)
        assert {tag.holders for tag in found.values()} == {tuple(found)}


def test_holders_of_a_set_list_its_parameters_in_one_order() -> None:
    """The third layer uses the weights of the first one in the other order; the sums must meet the right ones."""
    first, last = nn.Bilinear(2, 2, 2), nn.Sequential(nn.Linear(2, 2), nn.Bilinear(2, 2, 2))
    model = nn.Sequential(first, nn.Linear(2, 2), last)
    last[1].bias, last[0].bias = first.bias, nn.Parameter(torch.zeros(2))
    last[0].register_parameter("shared", first.bias)
    last[1].weight = first.weight
    ranks = on_all_ranks(model, [(0, 0), (1, 1), (2, 2)], [(0, 1, 2)])
    sets = [tied_sets(stages, tags) for stages, tags in ranks]
    names = [[held.names for held in each] for each in sets]
    assert names == [[["0.weight", "0.bias"]], [], [["0.weight", "0.bias"]]]
    own = list(named_parameters({2: ranks[2][0][2]}))
    assert own.index("0.bias") < own.index("0.weight"), "the third stage meets them in the other order"
    assert [[(held.holders, held.counted) for held in each] for each in sets] == [
        [((0, 2), {"0.weight", "0.bias"})],
        [],
        [((0, 2), set())],
    ]


def test_sets_are_of_one_stage_or_of_one_group_of_holders() -> None:
    stages, tags = on_all_ranks(tied(), rows=[V])[1]
    assert {stage: held.names for stage, held in stage_sets(stages, tags, StageGradients).items()} == {1: [], 2: []}
    assert [held.names for held in tied_sets(stages, tags)] == [["1.weight", "1.bias"]]


def test_every_rank_knows_all_groups_of_holders() -> None:
    topology = Topology.grid(4, 2)
    groups = holder_groups(find_ties(layers_of(tied(), 0)), ONE_LAYER_EACH, partial(topology.holders, shard=0))
    assert groups == [(0, 1, 6, 7), (2, 3, 4, 5), (2, 3, 4, 5)]
