"""``hardware.links``: an island in a node in a network, by hand; what is wrong with a list is told by its entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_profiles import layer, model
from planning_problems import problem

from runner.config.compose.resolve import config_from_container, fingerprint, resolve, to_container
from runner.config.rules.sections import rules
from runner.errors import RequestError
from runner.plan.make import make_plan
from runner.plan.planners.cuts import all_of
from runner.plan.planners.orders import Orders
from runner.plan.planners.stages import Setting, StageTable
from runner.plan.planners.values import problem_from_json
from runner.plan.rules.unread import unread_keys
from runner.plan.time.network import LinkClass, Network, network_of
from runner.plan.values import Link
from runner.profile import Exchange

NEAR, MIDDLE, FAR = Link(0.1, 100.0), Link(0.2, 50.0), Link(0.3, 40.0)


def classes(island: int, node: int, shared: tuple[bool, bool]) -> str:
    """The three classes as an override; ``shared``: the node's link and the network."""

    def one(name: str, ranks: object, link: Link, is_shared: bool) -> str:
        speeds = f"latency_seconds: {link.latency_seconds}, bytes_per_second: {link.bytes_per_second}"
        return f"{{name: {name}, ranks: {ranks}, {speeds}, shared: {str(is_shared).lower()}}}"

    entries = (
        one("nvlink", island, NEAR, False),
        one("pcie", node, MIDDLE, shared[0]),
        one("net", "all", FAR, shared[1]),
    )
    return f"hardware.links=[{', '.join(entries)}]"


def network(island: int, node: int, *shared: bool) -> Network:
    return network_of(resolve(["model=mlp", classes(island, node, (shared[0], shared[1]))]))


@pytest.mark.parametrize(
    ("links", "message", "ring"),
    [
        # Stage 0 is ranks 0 to 3, replicas are 2 ranks apart, parts are neighbours; 10 bytes between stages, 40 to sum.
        (classes(4, 8, (False, False)), 0.2 + 10 / 50, 2 * (0.1 + 20 / 100)),  # all within a node
        (classes(4, 8, (True, True)), 0.2 + 10 / (50 / 4), 2 * (0.1 + 20 / 100)),  # four ranks leave the island at once
        (classes(2, 4, (False, True)), 0.3 + 10 / (40 / 4), 2 * (0.2 + 20 / 50)),  # four ranks leave the node at once
        (classes(2, 4, (True, False)), 0.3 + 10 / 40, 2 * (0.2 + 20 / (50 / 2))),  # two ranks leave the island at once
    ],
)
def test_the_step_of_three_degrees_by_hand(links: str, message: float, ring: float) -> None:
    """GPipe of two stages and two micro-batches: 3 (f + b) and a message there and back; then the sum of gradients."""
    degrees = [f"parallelism.{each}=2" for each in ("pipeline", "data", "tensor")]
    words = ["schedule=gpipe", "schedule.microbatches=2", "data.batch_size=4", "memory_limit=1GB"]
    exchange = (Exchange("all_reduce", 100),)
    layers = [layer(forward_exchanges=exchange, backward_exchanges=exchange)] * 2
    plan = make_plan(resolve(["model=mlp", *degrees, *words, links]), model(layers))
    exchanged = 2 * (0.1 + 50 / 100)  # the two ranks that divide a layer are neighbours
    assert plan.time.step_seconds == pytest.approx(3 * (1 + 2 + 2 * exchanged) + 2 * message + ring, rel=1e-12)


def test_the_short_keys_are_two_classes() -> None:
    short = ["hardware.link_bytes_per_second=100", "hardware.link_latency_seconds=0.1", "hardware.devices_per_node=4"]
    words = ["name: near, ranks: 4, bytes_per_second: 100", "name: far, ranks: all, bytes_per_second: 40, shared: true"]
    long = ",".join(f"{{{each}, latency_seconds: 0.1}}" for each in words)
    one = network_of(resolve(["model=mlp", *short, "hardware.network_bytes_per_second=40"]))
    other = network_of(resolve(["model=mlp", f"hardware.links=[{long}]"]))
    assert one.classes == other.classes
    assert other.boundaries([[0, 1]], 4, 1) == (Link(0.1, 10.0),)


def test_what_a_link_takes_if_it_is_emulated() -> None:
    """Each rank of a node has its part of a network that they share; a slower link of ``transport`` comes on top."""
    found = network(2, 4, False, True)
    pairs = [found.emulated(1, other, 8) for other in (0, 2, 4)]
    assert pairs == [(0.1, 100.0), (0.2, 50.0), (0.3, 10.0)]
    shared = "hardware.links=[{name: bus, ranks: all, latency_seconds: 0, bytes_per_second: 100, shared: true}]"
    words = ["model=mlp", classes(2, 4, (False, False)), "transport.emulate_links=true", "transport.delay_seconds=1"]
    assert network_of(resolve(words)).emulated(0, 7, 8) == (1.3, 40.0)
    assert network_of(resolve(["model=mlp", shared])).emulated(0, 3, 4) == (0.0, 25.0)  # all four send
    (told,) = [each.line() for each in rules(resolve(["model=mlp", "transport.emulate_links=true"]))]
    assert "transport.emulate_links = true: must be false without hardware.links" in told


def test_other_groups_of_three_classes() -> None:
    found = network(2, 6, False, True)
    assert found.boundaries([list(range(7))], 1, 1) == (NEAR, MIDDLE, NEAR, MIDDLE, NEAR, FAR)
    assert (found.replicas([0], 2, 1), found.replicas([0], 3, 1), found.replicas([1], 4, 1)) == (NEAR, MIDDLE, FAR)
    assert (found.parts(2), found.parts(3), found.parts(4)) == (NEAR, MIDDLE, Link(0.3, 40.0 / 6))
    slow = network_of(resolve(["model=mlp", classes(2, 6, (False, True)), "transport.delay_seconds=1"]))
    assert slow.inside == Link(1.1, 100.0)
    bus = Network((LinkClass(NEAR, 4, shared=True), LinkClass(FAR)))
    assert bus.boundaries([[0, 1]], 2, 1) == (Link(0.1, 50.0),)  # two of the four send at once


def test_the_search_takes_the_classes() -> None:
    of = replace(problem(0), links=network(1, 2, False, True), ranks=4)
    assert problem_from_json(of.to_json()) == of
    order = Orders().of(of.orders[0], 4, 8)
    assert order is not None
    table = StageTable(of, Setting(of.divisions[0], 1.0, 8, 1, None))
    found = table.costs(all_of(order, table, range(1)), order)
    boundary, (links, uses) = of.divisions[0].boundary, (of.links, [MIDDLE, FAR, MIDDLE])
    assert links.boundaries(order.rows, 1, 1) == tuple(uses)
    sent = [float(boundary[stage]) for stage in range(3)]  # the first cut has one layer in each of the first stages
    wanted = [link.seconds(size) for link, size in zip(uses, sent, strict=True)]
    assert [float(each[0]) for each in found.message] == pytest.approx(wanted)


def wrong(entries: str, *words: str) -> list[str]:
    try:
        return [each.line() for each in rules(resolve(["model=mlp", f"hardware.links=[{entries}]", *words]))]
    except RequestError as error:
        return [each.line() for each in error.problems]


GOOD: Any = "{name: near, ranks: 4, bytes_per_second: 1e9}"
END: Any = "{name: far, ranks: all, bytes_per_second: 1e9}"


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (f"{GOOD},{{name: b, ranks: 6, bytes_per_second: 1e9}},{END}", "links[1].ranks = 6: must be a multiple of 4."),
        (f"{GOOD},{{name: b, ranks: 2, bytes_per_second: 1e9}},{END}", "links[1].ranks = 2: must be more than 4."),
        (f"{END},{GOOD}", "links[1].ranks = 4: must be of a class that is used."),
        ("{name: a, ranks: 0, bytes_per_second: 1e9}", "links[0].ranks = 0: must be a whole number above 0, or all."),
        (f"{{name: a, bytes_per_second: 1e9}},{END}", "links[0].ranks = null: must be a whole number above 0, or all."),
        (
            "{name: a, ranks: all, bytes_per_second: 0}",
            "links[0].bytes_per_second = 0.0: must be a finite number above",
        ),
        ("{name: a, ranks: all}", "links[0].bytes_per_second = 0.0: must be a finite number above 0."),
        (f"{END[:-1]}, latency_seconds: -1}}", "links[0].latency_seconds = -1.0: must be a finite number, 0 or above."),
        ("{ranks: all, bytes_per_second: 1e9}", "links[0].name = : must be given."),
        (f"{GOOD},{END.replace('far', 'near')}", "links[1].name = near: must not be the name of another class."),
        (f"{END[:-1]}, share: true}}", "links[0].share = true: there is no such key. An entry has name, ranks,"),
        (f"{END[:-1]}, shared: 3}}", "links[0].shared = 3: must be true or false."),
        ("{name: a, ranks: 1, bytes_per_second: 1e9}", "links[0].ranks = 1: must hold all 2 ranks."),
    ],
)
def test_what_is_wrong_with_a_class_is_told(entries: str, told: str) -> None:
    assert [told in line for line in wrong(entries, "parallelism.pipeline=2")] == [True], wrong(entries)


def test_links_stay_with_a_request_and_change_no_weight() -> None:
    config = resolve(["model=mlp", "parallelism.data=2", f"hardware.links=[{GOOD},{END}]"])
    assert not wrong(f"{GOOD},{END}")
    assert config_from_container(to_container(config)) == config
    assert fingerprint(config) == fingerprint(resolve(["model=mlp", "parallelism.data=2"]))
    (told,) = unread_keys(config, {"hardware.link_bytes_per_second": True, "hardware.links": True}, "plan")
    assert (told.path, told.why[:14]) == ("hardware.link_bytes_per_second", "hardware.links")
