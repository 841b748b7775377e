"""Commands with strange models and empty caches end with a status of the runner's, never by a signal."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_two_hundred_starts(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "starts.py"), "200", str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    assert sum(found.values()) == 200
    assert set(found) <= {0, 1, 2, 3}
    assert found[0] >= 190
