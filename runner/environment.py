"""The environment of a run: versions, hardware and commit, found without large imports."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from runner import __version__

__all__ = ["arithmetic", "environment"]

_PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "deepspeed")


def environment() -> dict[str, Any]:
    """The record's ``versions``, ``hardware`` and ``commit``; what torch knows is there only if it is imported."""
    return {"versions": _versions(), "hardware": _hardware(), "commit": _commit()}


def arithmetic() -> dict[str, str | None]:
    """What decides the last bits of results on a CPU: its kind, the instructions that kernels use, torch's version.

    ``ATEN_CPU_CAPABILITY`` limits the instructions. They are None where torch is not imported.
    """
    return {"cpu": _cpu_name(), "cpu_capability": _cpu_capability(), "torch": _versions()["torch"]}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "runner": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _hardware() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_capability": _cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: use what platform knows
    return platform.processor() or platform.machine()


def _cpu_capability() -> str | None:
    """The vector instructions of torch's kernels, e.g. ``AVX2``."""
    torch = sys.modules.get("torch")
    return torch.backends.cpu.get_cpu_capability() if torch is not None else None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _commit() -> str | None:
    """The commit of the git repository that contains the working directory, if any."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
