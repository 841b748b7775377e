"""A rank function that tells at which addresses the ranks listen, and what a stranger finds in their store."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from runner.config.schema import RunConfig
from runner.record import RunRecord

_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
_LISTENS = "0A"


def tell(config: RunConfig, run_dir: Path) -> None:
    """Called on every rank."""
    dist.all_reduce(torch.ones(1))
    own: list[str] = []
    inodes = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and fd.exists()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in inodes and words[3] == _LISTENS:
                own.append(words[1].partition(":")[0])
    (run_dir / f"listens_{dist.get_rank()}").write_text(json.dumps(own))
    dist.barrier()
    if dist.get_rank() == 0:
        _write(run_dir)
    dist.barrier()


def _write(run_dir: Path) -> None:
    places = [place for rank in range(2) for place in json.loads((run_dir / f"listens_{rank}").read_text())]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.distributed_c10d._get_default_store()
    store.set("told", "a secret")
    stranger = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=300)
    )
    told = {
        "sockets": len(places),
        "elsewhere": [place for place in places if place not in _LOOPBACK],
        "seen_by_a_stranger": any(stranger.check([key]) for key in ("told", "default_pg/0//told", "0//told")),
        "token": os.environ["RUNNER_STORE_TOKEN"],
    }
    (run_dir / "told.json").write_text(json.dumps(told))
    RunRecord(status="ok", steps=2, loss=[2.0, 1.0]).save(run_dir)
