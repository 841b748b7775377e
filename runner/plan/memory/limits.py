"""Finds the number of bytes that a rank may use, from the request or the machine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from runner.config.schema import RunConfig
from runner.config.units import parse_bytes
from runner.errors import Problem, RequestError

__all__ = [
    "gpu_memory_bytes",
    "host_memory_bytes",
    "machine_memory_bytes",
    "memory_limit_bytes",
    "on_accelerator",
    "ranks_of_a_node",
]


def memory_limit_bytes(
    config: RunConfig, *, local_ranks: int, device_bytes: int | None = None, machine_bytes: int | None = None
) -> int:
    """The number of bytes that one rank may use: the requested limit, or else the memory of the device.

    Args:
        config: the request; ``memory_limit`` comes first, then ``hardware.memory_bytes``.
        local_ranks: number of ranks that share this machine's memory.
        device_bytes: memory of this machine's accelerator; None if the run does not use one.
        machine_bytes: memory of the machine with the least; None: of this one.

    Raises:
        RequestError: the run is for a GPU whose memory is not known.
        ValueError: ``memory_limit`` is no size; the rules of the configuration refuse such a value earlier.
    """
    if config.memory_limit is not None:
        return parse_bytes(config.memory_limit)
    if config.hardware.memory_bytes is not None:
        return int(config.hardware.memory_bytes)
    if device_bytes is not None:
        return device_bytes
    if config.device == "cuda":
        found = gpu_memory_bytes()
        if found is not None:
            return found
        why = "The memory of the device is not known, because this machine has no GPU that could be asked"
        fix = "hardware=a100_80gb or memory_limit=80GB"
        raise RequestError([Problem("memory_limit", None, "must be given with device=cuda", why, fix)])
    return (machine_bytes or machine_memory_bytes()) // local_ranks


def host_memory_bytes(config: RunConfig, *, local_ranks: int, machine_bytes: int | None = None) -> int | None:
    """The bytes of the host's memory to which one rank may offload; None if the machine's memory is not known."""
    if config.hardware.host_memory_bytes is not None:
        return int(config.hardware.host_memory_bytes) // local_ranks
    return (machine_bytes or machine_memory_bytes()) // local_ranks if config.hardware.name == "auto" else None


def ranks_of_a_node(config: RunConfig) -> int:
    """The number of ranks that share a machine's memory: all, unless the request or the hardware has several nodes."""
    degrees = config.parallelism
    ranks = -(-degrees.pipeline * degrees.data * degrees.tensor // (config.launcher.nodes or 1))
    return min(ranks, config.hardware.devices_per_node or ranks)


def on_accelerator(config: RunConfig, device_bytes: int | None = None) -> bool:
    """Whether the plan is for a device that has its own memory, separate from the host's.

    Args:
        config: the request; ``device`` comes first, then ``hardware``.
        device_bytes: memory of this machine's accelerator; None if the run does not use one.
    """
    if config.device != "auto":
        return config.device == "cuda"
    if config.hardware.name == "auto":
        return device_bytes is not None
    return not config.hardware.name.endswith("_cpu")


def gpu_memory_bytes() -> int | None:
    """The memory of this machine's smallest GPU, as ``nvidia-smi`` reports it; None if there is no GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    mebibytes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return min(mebibytes) * 2**20 if mebibytes else None


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """The memory that this process may use, which is the least of several limits.

    They are the limits of its control group (v1 or v2) and of all groups above it, and MemTotal of ``/proc/meminfo``.
    On a system without any of these, ``os.sysconf`` tells the memory of the machine.

    Args:
        root: the folder in which proc and sys are mounted.
    """
    found = [*_group_limits(root), *_total(root)]
    return min(found) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _total(root: Path) -> list[int]:
    text = _read(root / "proc/meminfo")
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return [int(match.group(1)) * 1024] if match else []


def _group_limits(root: Path) -> list[int]:
    groups = root / "sys/fs/cgroup"
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits.extend(_limits_upwards(groups, path, "memory.max"))
        elif "memory" in controllers.split(","):
            limits.extend(_limits_upwards(groups / "memory", path, "memory.limit_in_bytes"))
    return limits


def _limits_upwards(mount: Path, path: str, name: str) -> list[int]:
    """The limits of a group and of all groups above it; in a container, the mount may be the group itself."""
    group = mount / path.lstrip("/")
    folders = [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    texts = (_read(folder / name).strip() for folder in {*folders, mount})
    return [int(text) for text in texts if text.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
