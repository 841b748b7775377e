"""Two machines whose clocks began at other times: what is measured across them is as on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from user_project import make_directory, record, train

ANOTHER_CLOCK = """

import os
import time

if os.environ.get("RANK") == "1":  # as on a machine that was started a day before the other
    here = time.perf_counter
    time.perf_counter = lambda: here() + 86400
"""


@pytest.mark.costly
def test_a_bubble_across_machines(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    with (directory / "mine.py").open("a") as file:
        file.write(ANOTHER_CLOCK)
    done = train(directory, "parallelism.pipeline=2", "schedule.microbatches=4", "trainer.max_steps=6")
    assert done.returncode == 0, done.stderr
    made = record(directory / "run")
    assert 0 < made["bubble_ratio"]["measured"] < 0.999
    events = json.loads((directory / "run" / "timeline.json").read_text())["traceEvents"]
    moments = [event["ts"] / 1e6 for event in events if "ts" in event]
    assert max(moments) - min(moments) < 3600
