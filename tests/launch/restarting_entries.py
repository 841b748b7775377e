"""Rank functions of a run that is started again; each waits until the spare is there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

from runner.config.schema import RunConfig
from runner.pulse import Phase, Pulse
from runner.record import RunRecord

_TEMPLATE = "runner.launch.local.template"
_PATIENCE_SECONDS = 1500.0


def fail_first(config: RunConfig, run_dir: Path) -> None:
    """Take steps, and fail once the spare is there; the second time, end well."""
    rank = int(os.environ["RANK"])
    again = (run_dir / f"forked_first_{rank}").exists()
    (run_dir / f"forked_{'second' if again else 'first'}_{rank}").write_text(_forked(run_dir))
    if again:
        if rank == 0:
            RunRecord.load(run_dir).replace(status="ok", steps=2, loss=[2.0, 1.0]).save(run_dir)
        return
    if dist.is_initialized():
        dist.barrier()
    Pulse.current().enter(Phase.STEP)
    _wait_for_spare(run_dir)
    if dist.is_initialized():
        dist.barrier()
    raise RuntimeError("the first start fails")


def wait_for_the_spare(config: RunConfig, run_dir: Path) -> None:
    """Take steps until the spare is there, and end well."""
    Pulse.current().enter(Phase.STEP)
    _wait_for_spare(run_dir)
    RunRecord.load(run_dir).replace(status="ok", steps=2, loss=[2.0, 1.0]).save(run_dir)


def _forked(run_dir: Path) -> str:
    """Whether this rank was forked, and if so from a template that began to import before this start."""
    if _TEMPLATE not in Path("/proc/self/cmdline").read_text():
        return "no"
    return "ahead" if (run_dir / "spare").exists() else "in time"


def _wait_for_spare(run_dir: Path) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not _spares():
        assert time.monotonic() < end
        time.sleep(0.05)
    (run_dir / "spare").touch()


def _spares() -> list[str]:
    """The templates among the children of this rank's parent; a forked rank has a template's command line, too."""
    found = []
    for child in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
        try:
            name = Path(f"/proc/{child}/comm").read_text().strip()
            is_template = _TEMPLATE in Path(f"/proc/{child}/cmdline").read_text()
        except OSError:
            continue
        if is_template and not name.startswith("rank "):
            found.append(child)
    return found
