"""What this machine can run: one row per thing that the runner may need, with the way to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.environment import environment
from runner.launch.zero_needs import has_libaio

__all__ = ["PYTHON", "VERSIONS", "Check", "examine"]

PYTHON = ">=3.11"
VERSIONS = {
    "torch": ">=2.11,<2.14",
    "lightning": ">=2.6.4,<2.7",
    "hydra-core": ">=1.3,<1.4",
    "omegaconf": ">=2.3,<2.4",
}
"""Supported versions; the package's own requirements say the same."""

_OF_DEFAULT_RECIPE = ("emoji", "emosvg", "resvg-py", "pillow")
_SLURM = ("sbatch", "srun", "squeue", "scontrol")
_LEAST_DISK_BYTES = 2e9
_LEAST_MEMORY_BYTES = 2e9
_GLOO_SECONDS = 60
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60

# Two ranks add a number over Gloo. They leave as ranks do, past the teardown in which torch's threads may abort.
_RANK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
total = torch.ones(1)
dist.all_reduce(total)
dist.barrier()
os._exit(0 if total.item() == 2 else 1)
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing.

    Args:
        name: what was looked for.
        ok: whether it is there.
        found: what is there, or why it is not.
        fix: one line that helps; empty where nothing is missing.
        needed: whether training needs it at all; else only some options do.
    """

    name: str
    ok: bool
    found: str
    fix: str = ""
    needed: bool = False

    def to_json(self) -> dict[str, Any]:
        """A row of ``runner doctor --json``."""
        return {"status": "ok" if self.ok else "missing", **{k: v for k, v in asdict(self).items() if k != "ok"}}


def examine(outputs: Path) -> list[Check]:
    """Every check, in the order of being shown.

    Args:
        outputs: the folder that runs will be written below.
    """
    checks: list[Callable[[], list[Check]]] = [
        _python,
        _packages,
        _cores,
        _memory,
        lambda: _disk(outputs),
        _gloo,
        _cuda,
        _deepspeed,
        _slurm,
        _recipe_packages,
    ]
    return [row for check in checks for row in check()]


def _python() -> list[Check]:
    version = platform.python_version()
    ok = sys.version_info >= tuple(int(part) for part in PYTHON.removeprefix(">=").split("."))
    return [Check("python", ok, version, "" if ok else f"use Python {PYTHON}", needed=True)]


def _packages() -> list[Check]:
    from packaging.specifiers import SpecifierSet

    rows = []
    for package, supported in VERSIONS.items():
        version = _version(package)
        ok = version is not None and SpecifierSet(supported).contains(version, prereleases=True)
        found = version or "not installed"
        fix = "" if ok else f'pip install "{package}{supported}"'
        rows.append(Check(package, ok, found if ok else f"{found}, supported is {supported}", fix, needed=True))
    return rows


def _cores() -> list[Check]:
    hardware = environment()["hardware"]
    return [Check("cpu", True, f"{hardware['cores']} cores, {hardware['cpu']}", needed=True)]


def _memory() -> list[Check]:
    total = environment()["hardware"]["memory_bytes"]
    limit = _cgroup_limit()
    usable = min((value for value in (total, limit) if value is not None), default=None)
    if usable is None:
        return [Check("memory", True, "the system does not say", needed=True)]
    found = f"{usable / 1e9:.1f} GB" + (" (limit of the control group)" if usable == limit and usable != total else "")
    ok = usable >= _LEAST_MEMORY_BYTES
    return [Check("memory", ok, found, "" if ok else "give the container or job 2 GB or more", needed=True)]


def _cgroup_limit() -> int | None:
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def _disk(outputs: Path) -> list[Check]:
    place = outputs.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK | os.X_OK):
        return [Check("disk", False, f"{place} is not writable", "run_dir=/a/place/you/may/write", needed=True)]
    ok = free >= _LEAST_DISK_BYTES
    fix = "" if ok else f"free some space below {place}, or run_dir=/another/disk/run"
    return [Check("disk", ok, f"{free / 1e9:.1f} GB free below {place}", fix, needed=True)]


def _gloo() -> list[Check]:
    """Two ranks for real: a host name that does not resolve or a closed loopback shows here."""
    import tempfile

    fix = "let processes talk over the loopback interface, or set GLOO_SOCKET_IFNAME=lo"
    if importlib.util.find_spec("torch") is None:
        return [Check("gloo", False, "torch is not installed", f'pip install "torch{VERSIONS["torch"]}"', needed=True)]
    with tempfile.TemporaryDirectory() as place:
        line = [sys.executable, "-c", _RANK, str(Path(place) / "store")]
        ranks = [
            subprocess.Popen([*line, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=_GLOO_SECONDS)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return [Check("gloo", False, f"two ranks did not meet within {_GLOO_SECONDS} s", fix, needed=True)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                if rank.stderr is not None:
                    rank.stderr.close()
    failed = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    if failed:
        return [Check("gloo", False, (failed[0].strip().splitlines() or ["it failed"])[-1], fix, needed=True)]
    return [Check("gloo", True, "two ranks met and added", needed=True)]


def _cuda() -> list[Check]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if torch.cuda.is_available():
        found = [
            f"{torch.cuda.get_device_name(index)} ({torch.cuda.get_device_properties(index).total_memory / 1e9:.0f} GB)"
            for index in range(torch.cuda.device_count())
        ]
        return [Check("cuda", True, f"{len(found)} x {found[0]}" if len(set(found)) == 1 else ", ".join(found))]
    if torch.version.cuda is None:
        fix = "on a machine with a GPU, install a CUDA build of torch (pytorch.org/get-started)"
        return [Check("cuda", False, f"torch {torch.__version__} is built without CUDA; device=cpu runs", fix)]
    fix = "check `nvidia-smi` and the driver; in a container, start it with its GPUs"
    return [Check("cuda", False, "torch sees no GPU; device=cpu runs", fix)]


def _deepspeed() -> list[Check]:
    version = _version("deepspeed")
    fix = "pip install deepspeed, for zero.stage and its offload"
    rows = [Check("deepspeed", version is not None, version or "not installed", "" if version else fix)]
    found = has_libaio()
    fix = "apt-get install libaio-dev, for offload=nvme"
    rows.append(Check("libaio", found, "library and header" if found else "not found", "" if found else fix))
    return rows


def _slurm() -> list[Check]:
    missing = [command for command in _SLURM if shutil.which(command) is None]
    if not missing:
        return [Check("slurm", True, ", ".join(_SLURM))]
    found = f"no {', '.join(missing)}; launcher=local runs"
    return [Check("slurm", False, found, "run on a login node of a SLURM cluster, for launcher=slurm")]


def _recipe_packages() -> list[Check]:
    missing = [package for package in _OF_DEFAULT_RECIPE if _version(package) is None]
    if not missing:
        return [Check("default recipe", True, ", ".join(_OF_DEFAULT_RECIPE))]
    return [Check("default recipe", False, f"no {', '.join(missing)}", f"pip install {' '.join(missing)}")]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
