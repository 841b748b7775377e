"""A rank function that tells what it finds; its module imports what training does."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy
import torch
from fake_entries import succeed
from lightning.fabric.utilities.rank_zero import rank_zero_only
from listening_entries import tell
from torchmetrics.utilities import prints

from runner.config.schema import RunConfig


def describe(config: RunConfig, run_dir: Path) -> None:
    """What a rank finds where it begins, as JSON."""
    known_ranks = [vars(function)["rank"] for function in (rank_zero_only, prints.rank_zero_only)]
    found = {
        "origin": sys.orig_argv[2],
        "name": Path("/proc/self/comm").read_text().strip(),
        "rank": [os.environ["RANK"], os.environ["LOCAL_RANK"], *known_ranks],
        "store": os.environ.get("RUNNER_STORE_FD") is not None,
        "leads": os.getsid(0) == os.getpid(),
        "files": [os.readlink(f"/proc/self/fd/{number}").rpartition("/")[2] for number in range(2)],
        "drawn": [random.random(), float(numpy.random.rand()), float(torch.rand(1))],
        "caught": [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN],
    }
    (run_dir / f"found_{os.environ['RANK']}.json").write_text(json.dumps(found))
    succeed(config, run_dir)
    tell(config, run_dir)
