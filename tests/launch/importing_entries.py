"""A rank function in a module whose import does what ``RUNNER_TEST_IMPORT`` says where ranks are forked from."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from fake_entries import succeed

from runner.config.schema import RunConfig

if any("template" in word for word in sys.orig_argv):
    match os.environ["RUNNER_TEST_IMPORT"]:
        case "waits":
            Path("importing").write_text(str(os.getpid()))
            time.sleep(3000)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "begins a thread":
            threading.Thread(target=time.sleep, args=(3000,), daemon=True).start()
if os.environ["RUNNER_TEST_IMPORT"] == "raises":
    raise ModuleNotFoundError("No module named 'tensors'")


def tell_origin(config: RunConfig, run_dir: Path) -> None:
    """As :func:`succeed`, and each rank leaves the name of the module that Python was started with."""
    (run_dir / f"origin_{os.environ['RANK']}").write_text(sys.orig_argv[2])
    succeed(config, run_dir)
