"""Stands in for a sweep's job, ``python -m light_job JOB_DIR ENTRY``: no model, no ranks, a record and an end.

By ``optimizer.lr``: above 100 it waits for the first time, above 10 it dies, else it ends well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from runner.launch.processes.supervise import die_with_parent
from runner.record import RunRecord, step_seconds

STARTS = "starts.txt"


def main(job_dir: Path) -> None:
    record = RunRecord.load(job_dir)
    lr = record.config["optimizer"]["lr"]
    with (job_dir / STARTS).open("a") as file:
        file.write("started\n")
    if lr > 100 and len((job_dir / STARTS).read_text().splitlines()) == 1:
        time.sleep(60)
    if 10 < lr < 100:
        os.kill(os.getpid(), signal.SIGSEGV if lr < 20 else signal.SIGKILL)
    seconds = record.step_seconds | step_seconds([0.1])
    record.replace(status="ok", steps=1, loss=[lr], step_seconds=seconds).save(job_dir)


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]))
