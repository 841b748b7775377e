"""One process per rank on this machine, one CPU thread each, over Gloo."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from runner.launch.local.allocator import KEEP_FREED_MEMORY
from runner.launch.processes.leaving import leave

__all__ = ["run_ranks"]

_LONGEST_WAIT = timedelta(minutes=5)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` as every rank; what rank 0 returned, which must be JSON-able.

    Raises:
        ProcessRaisedException: a rank failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(KEEP_FREED_MEMORY)  # read by an interpreter as it starts
        spawn(_rank, (world_size, Path(folder), function, args), nprocs=world_size)  # type: ignore[no-untyped-call]
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def _rank(rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size, timeout=_LONGEST_WAIT
    )
    result = function(*args)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)
