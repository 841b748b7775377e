"""Links of runs on several nodes: who crosses a node's end, and with how many others at the same time."""

from __future__ import annotations

from typing import Any

import pytest
from plan_profiles import layer, model

from runner.config.schema import HardwareConfig, RunConfig
from runner.plan.make import make_plan
from runner.plan.time.network import LinkClass, Network, one_link
from runner.plan.values import Link, RunPlan

NVLINK, OUT = Link(1e-6, 1000.0), 80.0


def of_nodes(per_node: int) -> Network:
    return Network((LinkClass(NVLINK, per_node), LinkClass(Link(1e-6, OUT), None, shared=True)))


def speeds(rows: tuple[tuple[int, ...], ...], data: int, tensor: int, per_node: int = 8) -> list[float | None]:
    found = of_nodes(per_node).boundaries(rows, data, tensor)
    assert {each.latency_seconds for each in found} <= {NVLINK.latency_seconds}
    return [each.bytes_per_second for each in found]


@pytest.mark.parametrize(
    ("stages", "data", "tensor", "expected"),
    [
        (8, 1, 1, [1000.0] * 7),  # one node
        (16, 1, 1, [1000.0] * 7 + [80.0] + [1000.0] * 7),  # one message at a time between two nodes
        (4, 2, 2, [1000.0, 20.0, 1000.0]),  # two places of four ranks in a node: four messages share its network
        (2, 16, 1, [10.0]),  # all eight ranks of a node send to another one
        (3, 5, 1, [40.0, 80.0 / 3]),  # of ranks 0 to 4, two send out of the node; of the next five, three
    ],
)
def test_messages_between_nodes_share_the_network(stages: int, data: int, tensor: int, expected: list[float]) -> None:
    assert speeds((tuple(range(stages)),), data, tensor) == expected


def test_the_slowest_pipeline_of_a_replica_counts_and_a_stage_beside_itself_sends_nothing() -> None:
    assert speeds(((0, 1, 2, 3), (3, 2, 1, 0)), 1, 1, per_node=2) == [1000.0, 80.0, 1000.0]
    assert speeds(((0, 1, 1, 0),), 4, 1, per_node=4) == [20.0, 1000.0, 20.0]  # a V


def test_rings_of_replicas() -> None:
    network = of_nodes(8)
    assert network.replicas([0], 8, 1) == NVLINK
    assert network.replicas([0], 16, 1).bytes_per_second == 80.0  # one ring
    assert network.replicas([0], 4, 4).bytes_per_second == 20.0  # a ring for each part
    assert network.replicas([1], 6, 1).bytes_per_second == 80.0  # ranks 6 to 11
    assert network.replicas([0, 3], 2, 1) == NVLINK  # both directions' copies, on one node
    assert one_link(NVLINK).replicas([0], 64, 1) == NVLINK


def planned(per_node: int | None, **degrees: int) -> RunPlan:
    config = RunConfig(memory_limit="1GB", hardware=HardwareConfig(link_bytes_per_second=1000.0))
    config.hardware.devices_per_node, config.hardware.network_bytes_per_second = per_node, 80.0
    config.schedule.microbatches = config.data.batch_size = 4
    for key, value in degrees.items():
        setattr(config.parallelism, key, value)
    return make_plan(config, model([layer(output_bytes=40, gradient_bytes=400)] * 4))


def costs(plan: RunPlan) -> Any:
    return plan.time.costs


def test_a_plan_takes_the_network_where_stages_and_replicas_meet_over_it() -> None:
    near, far = planned(4, pipeline=4), planned(2, pipeline=4)
    sent = [stage.output_bytes for stage in near.figures[:-1]]
    assert list(costs(near).comm) == [each / 1000.0 for each in sent]
    assert list(costs(far).comm) == [sent[0] / 1000.0, sent[1] / 80.0, sent[2] / 1000.0]
    assert far.time.step_seconds > near.time.step_seconds
    near, far = planned(4, data=4), planned(2, data=4)
    (stage,) = near.figures
    assert list(costs(near).reduce) == [pytest.approx(2 * 3 * stage.gradient_bytes / 4 / 1000.0)]
    assert list(costs(far).reduce) == [pytest.approx(2 * 3 * stage.gradient_bytes / 4 / 80.0)]
