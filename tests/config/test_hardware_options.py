"""What options of ``hardware`` have: the figures of a device, of its node, and where they are from."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.errors import RequestError

FOLDER = Path(__file__).parents[2] / "conf" / "hardware"
OPTIONS = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "auto")
ACCELERATORS = [name for name in OPTIONS if not name.endswith("_cpu")]


def test_the_machines_that_people_plan_for_are_there() -> None:
    asked = {"a100_40gb", "a100_80gb", "h100_80gb", "h200", "b200", "mi300x", "l40s", "a10", "rtx4090", "server16_cpu"}
    assert asked <= set(OPTIONS)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("h100", "h100_80gb"),
        ("H100_SXM", "h100_80gb"),
        ("a100", "a100_80gb"),
        ("4090", "rtx4090"),
        ("epyc", "server16_cpu"),
    ],
)
def test_a_machine_is_found_by_its_other_names(name: str, option: str) -> None:
    assert resolve([f"hardware={name}"]).hardware == resolve([f"hardware={option}"]).hardware
    assert resolve([f"hardware={name}", f"hardware={option}"]).hardware.name == option, "it is not chosen twice"
    with pytest.raises(RequestError, match="there is no such option"):
        resolve([f"hardware={name}0"])


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_names_its_sources_and_the_memory_of_a_device(name: str) -> None:
    found = resolve([f"hardware={name}"]).hardware
    assert found.name == name
    assert found.source
    assert "Source:" in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert found.memory_bytes is not None
    assert found.link_bytes_per_second is not None


@pytest.mark.parametrize("name", ACCELERATORS)
def test_an_accelerator_has_its_node_and_the_network_between_nodes(name: str) -> None:
    """Without them, 64 devices would be planned as one island. A node's way out is never faster than its links."""
    found = resolve([f"hardware={name}"]).hardware
    assert found.devices_per_node is not None
    assert found.network_bytes_per_second is not None
    assert found.host_link_bytes_per_second is not None
    assert found.host_memory_bytes is not None
    assert found.host_memory_bytes_per_second is not None
    assert found.link_bytes_per_second is not None
    assert found.memory_bytes_per_second is not None
    assert found.network_bytes_per_second <= found.devices_per_node * found.link_bytes_per_second
    assert found.host_link_bytes_per_second < found.memory_bytes_per_second
    assert found.flops["fp16"] >= found.flops["fp32"] >= 1e13
