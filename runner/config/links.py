"""The links between ranks: as a request states them, and as ``runner doctor --collectives`` has measured them."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.schema import HardwareConfig, LinkClassConfig, RunConfig

__all__ = ["ALL", "cache_root", "group_size", "links_file", "ranks_of_node", "with_measured_link"]

ALL = "all"
"""``ranks`` of the class of links that holds all ranks of a run."""


def group_size(links: LinkClassConfig) -> int | None:
    """The neighbouring ranks of a group of a class that rules allow; None: all ranks are one group."""
    return None if links.ranks == ALL else int(links.ranks)


def ranks_of_node(hardware: HardwareConfig) -> int | None:
    """The neighbouring ranks that exchange without the network, which is the last class of ``hardware.links``."""
    if len(hardware.links) > 1:
        return group_size(hardware.links[-2])
    return None if hardware.links else hardware.devices_per_node


def cache_root() -> Path:
    """The folder for measurements of this machine: ``$RUNNER_CACHE``, else ``~/.cache/runner``."""
    root = os.environ.get("RUNNER_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "runner"


def links_file() -> Path:
    """This machine's file, which holds ``bytes_per_second``, ``latency_seconds``, ``date`` and what was measured."""
    return cache_root() / "links" / f"{platform.node() or 'machine'}.json"


def with_measured_link(config: RunConfig) -> RunConfig:
    """Add measured figures of the link to ``hardware=auto``, if there are any and the request names none.

    They become part of the request, so that ranks on other machines plan with the same figures.
    """
    hardware = config.hardware
    is_stated = hardware.link_bytes_per_second is not None or hardware.link_latency_seconds or hardware.links
    if hardware.name != "auto" or is_stated:
        return config
    try:
        found: dict[str, Any] = json.loads(links_file().read_text(encoding="utf-8"))
        link: dict[str, Any] = {
            "link_bytes_per_second": float(found["bytes_per_second"]),
            "link_latency_seconds": float(found["latency_seconds"]),
            "source": f"{hardware.source}; its links by runner doctor --collectives, {found['date']}",
        }
    except (OSError, ValueError, KeyError, TypeError):
        return config
    return replace(config, hardware=replace(hardware, **link))
