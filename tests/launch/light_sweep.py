"""The command ``runner`` with light jobs in place of a sweep's: see ``light_job``."""

from __future__ import annotations

import sys

from runner.cli.main import main
from runner.launch import sweep

if __name__ == "__main__":
    sweep.JOB_MODULE = "light_job"
    sys.exit(main(sys.argv[1:]))
