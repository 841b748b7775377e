"""Reports what this machine can run: one row for each requirement, with a way to meet it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.config.links import links_file
from runner.environment import environment
from runner.launch.doctor.collectives import RING, measure_collectives, start_together
from runner.launch.doctor.link_fit import LinkFit
from runner.launch.needs.zero import has_libaio
from runner.launch.processes.meeting import FIRST_PORT, NUM_PORTS
from runner.optim.catalogue.registry import OPTIMIZERS

__all__ = ["PYTHON", "VERSIONS", "Check", "collectives", "examine"]

PYTHON = ">=3.11"
VERSIONS = {
    "torch": ">=2.11,<2.16",
    "lightning": ">=2.6.4,<2.7",
    "hydra-core": ">=1.3,<1.4",
    "omegaconf": ">=2.3,<2.4",
}
"""Supported versions, the same as in the requirements of this package."""

_OF_DEFAULT_RECIPE = ("emoji", "emosvg", "resvg-py", "pillow")
_SLURM = ("sbatch", "srun", "squeue", "scontrol")
_LEAST_DISK_BYTES = 2e9
_LEAST_MEMORY_BYTES = 2e9
_LEAST_SHARED_BYTES = 256e6
_GLOO_SECONDS = 60
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60

# Two ranks add a number over Gloo. Like ranks of a run, they skip the teardown in which torch's threads may abort.
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
    """The result of one check.

    Args:
        name: what was looked for.
        ok: whether it was found.
        found: what was found, or why it was not.
        fix: one line that tells how to get it, or what to type to use what was found; empty if there is neither.
        needed: True if training always needs it or if the user named it; False if only some options need it.
    """

    name: str
    ok: bool
    found: str
    fix: str = ""
    needed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the row as it appears in ``runner doctor --json``."""
        return {"status": "ok" if self.ok else "missing", **{k: v for k, v in asdict(self).items() if k != "ok"}}


def examine(outputs: Path) -> list[Check]:
    """Run every check and return the rows in the order in which they are shown.

    Args:
        outputs: the folder below which runs will be written.
    """
    checks: list[Callable[[], list[Check]]] = [
        _python,
        _packages,
        _cores,
        _memory,
        lambda: _disk(outputs),
        _shared_memory,
        _ports,
        _gloo,
        _cuda,
        _libraries,
        _libaio,
        _slurm,
        _submitit,
        _mpirun,
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
    """Start two real ranks: this finds a host name that does not resolve and a closed loopback interface."""
    fix = "let processes talk over the loopback interface, or set GLOO_SOCKET_IFNAME=lo"
    if importlib.util.find_spec("torch") is None:
        return [Check("gloo", False, "torch is not installed", f'pip install "torch{VERSIONS["torch"]}"', needed=True)]
    with tempfile.TemporaryDirectory() as place:
        line = [sys.executable, "-c", _RANK, str(Path(place) / "store")]
        try:
            ended = start_together([[*line, str(rank)] for rank in range(2)], _GLOO_SECONDS)
        except TimeoutError:
            return [Check("gloo", False, f"two ranks did not meet within {_GLOO_SECONDS} s", fix, needed=True)]
    failed = [error for status, _, error in ended if status]
    if failed:
        return [Check("gloo", False, (failed[0].strip().splitlines() or ["it failed"])[-1], fix, needed=True)]
    return [Check("gloo", True, "two ranks met and added", needed=True)]


def _shared_memory() -> list[Check]:
    """Check /dev/shm, through which the workers of a data loader hand over their batches."""
    place = "/dev/shm"
    if not os.path.isdir(place):
        return [Check("shared memory", False, f"no {place}: data.workers=0 runs", f"mount a tmpfs at {place}")]
    free = shutil.disk_usage(place).free
    fix = "" if free >= _LEAST_SHARED_BYTES else "start the container with --shm-size=1g, or keep data.workers=0"
    return [Check("shared memory", not fix, f"{free / 1e9:.1f} GB free in {place}", fix)]


def _ports() -> list[Check]:
    """Check that a port can be opened, and that the ports where ranks meet are not used for outgoing connections.

    The second check matters for ranks that srun and mpirun start.
    """
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
    except OSError as error:
        fix = "let processes listen on the loopback interface"
        return [Check("ports", False, f"none to listen at: {error}", fix, needed=True)]
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return [Check("ports", True, "one to listen at", needed=True)]
    last = FIRST_PORT + NUM_PORTS - 1
    if first <= last:
        found = f"outgoing connections take ports from {first} on, ranks on several nodes meet at {FIRST_PORT}..{last}"
        return [Check("ports", False, found, "set MASTER_PORT to a free port where ranks cannot meet")]
    return [Check("ports", True, f"{FIRST_PORT}..{last} are free of outgoing connections", needed=True)]


def collectives(device: str, num_ranks: int) -> list[Check]:
    """Check the values and the speed of the collectives; one row for each of them, and one for the link.

    Args:
        device: see :func:`runner.launch.doctor.collectives.measure_collectives`.
        num_ranks: how many ranks take part.
    """
    fix = "see `runner doctor` for gloo; on GPUs run with NCCL_DEBUG=INFO"
    try:
        found = measure_collectives(num_ranks, device)
    except (RuntimeError, TimeoutError, OSError) as error:
        return [Check("collectives", False, str(error), fix, needed=True)]
    fits = {name: LinkFit(**each) for name, each in found["fits"].items()}
    rows = []
    for name, right in found["right"].items():
        speed = (
            f"{found['bus_bytes_per_second'][name] / 1e9:.2f} GB/s over {num_ranks} ranks" if right else "wrong values"
        )
        told = f"{speed}; a message takes {fits[name].told()}" if right else speed
        rows.append(Check(name, right, told, "" if right else fix, needed=True))
    if not all(found["right"].values()):
        return rows
    link = fits[RING]
    kept = f"{link.told()}; kept for hardware=auto in {links_file()}; to type, with a name of your own:"
    return [*rows, Check("link", True, kept, shlex.quote(link.as_override()))]


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
    fix = "check `nvidia-smi`; start a container with its GPUs"
    return [Check("cuda", False, "torch sees no GPU; device=cpu runs", fix)]


def _libraries() -> list[Check]:
    """A row for each package that only some options use, which the first install brings."""
    uses = {"deepspeed": ["zero.stage"]}
    for kind in OPTIMIZERS.values():
        if kind.package is not None:
            uses.setdefault(kind.package, []).append(f"optimizer={kind.name}")
    rows = []
    for package, options in uses.items():
        version = _version(package)
        fix = "" if version else f"pip install {package}, for {' and '.join(options)}"
        rows.append(Check(package, version is not None, version or "not installed", fix))
    return rows


def _libaio() -> list[Check]:
    found = has_libaio()
    fix = "apt-get install libaio-dev, for offload=nvme"
    return [Check("libaio", found, "library and header" if found else "not found", "" if found else fix)]


def _slurm() -> list[Check]:
    missing = [command for command in _SLURM if shutil.which(command) is None]
    if not missing:
        return [Check("slurm", True, ", ".join(_SLURM))]
    found = f"no {', '.join(missing)}; launcher=local runs"
    return [Check("slurm", False, found, "for launcher=slurm, run on a SLURM login node")]


def _submitit() -> list[Check]:
    versions = {package: _version(package) for package in ("submitit", "hydra-submitit-launcher")}
    if all(versions.values()):
        return [Check("submitit", True, ", ".join(f"{name} {version}" for name, version in versions.items()))]
    missing = [name for name, version in versions.items() if version is None]
    fix = "pip install -e '.[submitit]', for sweeps with hydra/launcher=submitit_slurm"
    return [Check("submitit", False, f"no {', '.join(missing)}", fix)]


def _mpirun() -> list[Check]:
    found = shutil.which("mpirun")
    fix = "" if found else "apt-get install openmpi-bin, to start ranks by mpirun"
    return [Check("mpirun", found is not None, found or "not on the PATH; srun, torchrun and launcher=local run", fix)]


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
