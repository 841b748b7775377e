"""The command ``runner`` with light jobs in place of a sweep's: see ``light_job``."""

from __future__ import annotations

import sys

from runner.cli.main import main
from runner.launch.sweep import jobs as sweep_jobs

if __name__ == "__main__":
    sweep_jobs.JOB_MODULE = "light_job"
    sys.exit(main(sys.argv[1:]))
