"""What ranks that divide layers send each other passes the link of their node, or the network beyond a node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_profiles import layer, model

from runner.config.compose.resolve import resolve
from runner.plan.part_notes import part_notes
from runner.plan.stages.figures import stage_figures
from runner.plan.time.network import LinkClass, Network, network_of, one_link
from runner.plan.time.predict import stage_costs
from runner.plan.time.tensor import exchange_seconds, scatters, with_boundaries
from runner.plan.values import Link
from runner.profile import BoundaryTensor, Exchange

NODE = ("hardware.devices_per_node=8", "hardware.network_bytes_per_second=80e9")


@pytest.mark.parametrize(("parts", "speed"), [(2, 100e9), (8, 100e9), (3, 10e9), (16, 10e9)])
def test_a_group_beyond_a_node_has_a_share_of_the_network(parts: int, speed: float) -> None:
    config = resolve(["model=gpt", f"parallelism.tensor={parts}", *NODE])
    assert network_of(config, Link(1e-5, 100e9)).parts(parts) == Link(1e-5, speed)


def test_without_a_node_there_is_one_link() -> None:
    assert network_of(resolve(["model=gpt"]), Link(1e-5, 100e9)).parts(3) == Link(1e-5, 100e9)


def test_exchanges_take_the_messages_of_a_ring() -> None:
    """Four ranks: a sum is 6 messages of a quarter, a gathering 3; each waits a millisecond and sends 1000 bytes/s."""
    link = Link(1e-3, 1000.0)
    assert exchange_seconds([Exchange("all_reduce", 400)], 4, link) == pytest.approx(6 * (1e-3 + 0.1))
    assert exchange_seconds([Exchange("all_gather", 400, 2)], 4, link) == pytest.approx(2 * 3 * (1e-3 + 0.1))
    assert Exchange("all_reduce", 400).sent_bytes(4) == 600
    assert Exchange("reduce_scatter", 400, 3).sent_bytes(4) == 900


@pytest.mark.parametrize(
    ("asked", "pipeline", "scattered"),
    [
        ("null", 2, False),
        ("null", 8, True),
        ("true", 2, True),
        ("false", 8, False),
    ],
)
def test_boundaries_are_sent_by_parts_beyond_a_node(asked: str, pipeline: int, scattered: bool) -> None:
    layout = ("parallelism.tensor=2", f"parallelism.pipeline={pipeline}", f"parallelism.scatter_boundaries={asked}")
    assert scatters(resolve(["model=gpt", *layout, *NODE])) == scattered


def test_a_boundary_by_parts_takes_a_part_and_a_gathering() -> None:
    """400 bytes between stages over four parts: a message of 100, and then three of 100 between the parts."""
    config = resolve(
        ["model=gpt", "parallelism.tensor=4", "parallelism.pipeline=2", "parallelism.scatter_boundaries=true"]
    )
    layers = [layer(output_bytes=400, output=(BoundaryTensor(0, 400, 400),)) for _ in range(2)]
    profile = model(layers)
    figures, link = stage_figures(profile, ((0, 0), (1, 1))), Link(1e-3, 1000.0)
    whole = stage_costs(profile, figures, mean_samples=profile.samples, copies=[1, 1], link=link)
    made = with_boundaries(whole, config, profile, figures, 1.0, one_link(link), [[0, 1]])
    assert list(whole.comm) == [pytest.approx(1e-3 + 0.4)]
    assert list(made.comm) == [pytest.approx(1e-3 + 0.1 + 3 * (1e-3 + 0.1))]
    assert list(made.occupancy or ()) == [pytest.approx(0.1)]


def test_a_note_names_some_whole_weights_and_says_where_all_are() -> None:
    weights = tuple(f"{name}, it is an example" for name in "abcde")
    profile = replace(model([layer()]), whole_weights=tuple(f"left whole: {each}" for each in weights))
    (line,) = (line for line in part_notes(profile, 2, None, one_link(Link(1e-3, 1000.0))) if "divide" in line)
    assert line.endswith("c, it is an example; and 2 more, see whole_weights of runner plan --json")
    assert profile.parts_named == {"whole_weights": weights}


def test_a_note_counts_the_layers_in_which_ranks_draw_by_themselves() -> None:
    def told(draws: str) -> list[str]:
        profile = model([layer(name=name, draws_apart=name in draws) for name in "abcd"])
        return [line for line in part_notes(profile, 2, None, one_link(Link(1e-3, 1000.0))) if "dropout" in line]

    assert told("") == []
    assert [" layer b:" in line for line in told("b")] == [True]
    assert [" layer b and 1 more:" in line for line in told("bd")] == [True]
    assert [" layer a and 3 more:" in line for line in told("abcd")] == [True]


@pytest.mark.parametrize(("per_node", "told"), [(2, ["600 ms", "6 ms"]), (8, []), (None, [])])
def test_a_group_beyond_a_node_is_told_with_its_seconds(per_node: int | None, told: list[str]) -> None:
    """Two sums of 400 bytes by four ranks: 2 x 6 messages of 100 bytes, of 0.05 s each there and 0.5 ms here."""
    network = Network((LinkClass(Link(0.0, 200e3), 2), LinkClass(Link(0.0, 2e3))))
    profile = model([layer(forward_exchanges=(Exchange("all_reduce", 400, 2),))])
    lines = [line for line in part_notes(profile, 4, per_node, network) if "network" in line]
    assert [words in line for line in lines for words in told] == [True for _ in told]
    assert len(lines) == bool(told)
