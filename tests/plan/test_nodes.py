"""Plans for several nodes: advice that needs fewer of them, and the memory that the ranks of a node share."""

from __future__ import annotations

from plan_profiles import layer, model

from runner.config.schema import RunConfig
from runner.plan.make import make_plan
from runner.plan.memory.limits import host_memory_bytes, machine_memory_bytes, ranks_of_a_node

BLOCKS = model([layer()] * 8)


def on_nodes(nodes: int, pipeline: int = 4) -> RunConfig:
    config = RunConfig(memory_limit="1GB")
    config.launcher.name, config.launcher.nodes = "slurm", nodes
    config.parallelism.pipeline = pipeline
    config.schedule.name, config.schedule.microbatches = "1f1b", 8
    config.data.batch_size = 8
    return config


def test_one_device_fits_whatever_the_nodes() -> None:
    (line,) = [line for line in make_plan(on_nodes(2), BLOCKS).advice if "pipelining" in line]
    assert "does not fit" not in line
    assert "one device 192 s" in line or "one device 3 min" in line


def test_an_override_to_fewer_ranks_takes_fewer_nodes() -> None:
    config = on_nodes(3, pipeline=3)
    config.data.batch_size = config.schedule.microbatches = 1
    (line,) = [line for line in make_plan(config, BLOCKS).advice if "pipeline" in line]
    assert "data parallelism over 3 devices would have more replicas than samples" in line
    assert "schedule.microbatches=1 launcher.nodes=1" in line


def test_what_does_not_fit_is_told_with_its_size() -> None:
    config = on_nodes(2)
    config.memory_limit = "1100"
    plan = make_plan(config, BLOCKS)
    assert any("one device does not fit" in line for line in plan.advice)
    assert any(line.startswith("one device needs 1.69 kB of 1.10 kB") for line in plan.reasons)


def test_ranks_of_a_node_share_its_memory() -> None:
    assert ranks_of_a_node(on_nodes(2)) == 2
    assert host_memory_bytes(on_nodes(2), local_ranks=2) == machine_memory_bytes() // 2
    config = on_nodes(2)
    config.memory_limit = None
    assert make_plan(config, BLOCKS).memory_limit_bytes == machine_memory_bytes() // 2
    many = RunConfig()
    many.parallelism.data, many.hardware.devices_per_node = 16, 8
    assert ranks_of_a_node(many) == 8
