"""How many bytes a rank may use."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from runner.config.schema import RunConfig
from runner.config.units import parse_bytes
from runner.errors import Problem, RequestError

__all__ = ["gpu_memory_bytes", "host_memory_bytes", "machine_memory_bytes", "memory_limit_bytes", "on_accelerator"]


def memory_limit_bytes(config: RunConfig, *, local_ranks: int, device_bytes: int | None = None) -> int:
    """The bytes that one rank may use: what was asked for, else what the device has.

    Args:
        config: ``memory_limit`` first, then ``hardware.memory_bytes``.
        local_ranks: ranks that share this machine's memory.
        device_bytes: memory of this machine's accelerator, where the run uses one.

    Raises:
        RequestError: if the run is for a GPU of which nothing is known.
        ValueError: if ``memory_limit`` is no size; the configuration's rules say so before.
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
        rule = "the memory of the device is not known: this machine has none to ask"
        raise RequestError([Problem("memory_limit", None, rule, fix="hardware=a100_80gb or memory_limit=80GB")])
    return machine_memory_bytes() // local_ranks


def host_memory_bytes(config: RunConfig, *, local_ranks: int) -> int | None:
    """The part of the host's memory that one rank may offload to; None for a machine of which it is not known."""
    if config.hardware.host_memory_bytes is not None:
        return int(config.hardware.host_memory_bytes) // local_ranks
    return machine_memory_bytes() // local_ranks if config.hardware.name == "auto" else None


def on_accelerator(config: RunConfig, device_bytes: int | None = None) -> bool:
    """Whether the plan is for a device with memory of its own, beside the host's.

    Args:
        config: ``device``, else the machine: this one, or one that is described and not a CPU.
        device_bytes: memory of this machine's accelerator, where the run uses one.
    """
    if config.device != "auto":
        return config.device == "cuda"
    if config.hardware.name == "auto":
        return device_bytes is not None
    return not config.hardware.name.endswith("_cpu")


def gpu_memory_bytes() -> int | None:
    """Memory of this machine's smallest GPU as its driver's ``nvidia-smi`` tells it; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    mebibytes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return min(mebibytes) * 2**20 if mebibytes else None


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """What this process's control group may use (v1 or v2, the tightest of its ancestors), at most MemTotal.

    Args:
        root: where proc and sys are mounted.

    A system without ``/proc/meminfo`` answers by sysconf.
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
    """The limits of the group and of all above it; inside a container the group itself may be the mount."""
    group = mount / path.lstrip("/")
    folders = [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    texts = (_read(folder / name).strip() for folder in {*folders, mount})
    return [int(text) for text in texts if text.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
