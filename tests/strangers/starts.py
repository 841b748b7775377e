"""Starts commands with an empty cache, each in a process of its own that ends as any does, and prints their statuses.

``python tests/strangers/starts.py NUMBER FOLDER``; the processes are forked after the imports, which take most of a
command's time.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import torch._subclasses.fake_tensor  # noqa: F401

import runner.launch.run.prepare  # noqa: F401
import runner.memory.apply.rehearse  # noqa: F401
import runner.profiling.model  # noqa: F401
from runner.cli.main import main

MODELS = ("OwnSteps", "copied", "metric", "averaged", "pickled", "read", "hooked", "stored")
_TRAINS = 10  # every how many a run is trained


def words(number: int, folder: Path) -> list[str]:
    """The command line of a start."""
    named = [f"model.target=odd_constructors:{MODELS[number % len(MODELS)]}", "data.target=odd_constructors:data"]
    loss = [] if number % len(MODELS) == 0 else ["loss=cross_entropy"]
    layout = ["parallelism=single"] if number % 3 or number % len(MODELS) == 0 else ["schedule.microbatches=2"]
    sizes = ["data.batch_size=8", "device=cpu", *layout, *loss]
    if number % _TRAINS == _TRAINS - 1:
        return ["train", *named, *sizes, "trainer.max_steps=1", "logger=none", f"run_dir={folder}/run"]
    return ["plan", *named, *sizes]


def start(line: list[str], folder: Path) -> int:
    """The exit status of a command, negative for a signal."""
    child = os.fork()
    if child == 0:
        os.environ["RUNNER_CACHE"] = str(folder / "cache")
        out = os.open(folder / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.exit(main(line))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def start_all(count: int, folder: Path) -> Counter[int]:
    """How often the commands ended with each status; the output of the last one with an unknown status is shown."""
    found: Counter[int] = Counter()
    for number in range(count):
        place = folder / str(number)
        place.mkdir(parents=True)
        line = words(number, place)
        status = start(line, place)
        found[status] += 1
        if status != 0:
            print(" ".join(line), status, (place / "out").read_text()[-600:], flush=True)
        shutil.rmtree(place, ignore_errors=True)
    return found


if __name__ == "__main__":
    print(dict(start_all(int(sys.argv[1]), Path(sys.argv[2]))))
