"""Ranks that a script, Kubernetes or another tool starts with torch's variables alone are one run."""

from __future__ import annotations

import socket
from pathlib import Path
from subprocess import PIPE

import launch_helpers
import pytest
from launch_helpers import OVERRIDES, command
from warm import Warm

from runner.errors import RequestError
from runner.launch.mpi import complete_rank
from runner.launch.processes.meeting import MEETING_VARIABLE
from runner.record import RunRecord

RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PLACE = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def _port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def test_what_makes_a_process_a_rank() -> None:
    found = RANK | PLACE
    assert complete_rank(found)
    assert MEETING_VARIABLE in found
    assert not complete_rank({})
    assert not complete_rank(RANK | PLACE | {"RANK": "0", "WORLD_SIZE": "1"}), "a container of one process trains alone"
    assert not complete_rank({name: value for name, value in RANK.items() if name != "MASTER_ADDR"})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (RANK, "LOCAL_RANK = null: must be set"),
        (RANK | {"LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE = null: must be set"),
        (RANK | PLACE | {"RANK": "2"}, "RANK = 2: must be at least 0 and below WORLD_SIZE. WORLD_SIZE is 2"),
        (RANK | PLACE | {"LOCAL_RANK": "2"}, "LOCAL_RANK = 2: must be at least 0 and below LOCAL_WORLD_SIZE"),
        (RANK | PLACE | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = 9: must be at most WORLD_SIZE"),
        (RANK | PLACE | {"MASTER_PORT": "tcp://10.0.0.1:23456"}, "MASTER_PORT = tcp://10.0.0.1:23456: must be a whole"),
        (RANK | PLACE | {"WORLD_SIZE": "two"}, "WORLD_SIZE = two: must be a whole number"),
    ],
)
def test_what_is_wrong_is_told(given: dict[str, str], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        complete_rank(dict(given))


def test_a_variable_that_was_left_over_is_told(tmp_path: Path) -> None:
    variables = launch_helpers.environment() | RANK | PLACE | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": _port()}
    line = command("train", *OVERRIDES, entry="succeed")
    alone = Warm(line, cwd=tmp_path, env=variables, stderr=PIPE, text=True)
    _, told = alone.communicate(timeout=1500)
    assert alone.returncode == 2
    assert "WORLD_SIZE is 2. Try parallelism.data=2, or env -u RANK runner … for a run of its own." in told


def test_they_are_one_run(tmp_path: Path) -> None:
    """Each trained alone, in the same directory, before these variables were read."""
    line = command("train", *OVERRIDES, "parallelism.pipeline=2", entry="succeed")
    variables = launch_helpers.environment() | RANK | PLACE | {"MASTER_PORT": _port()}
    ranks = [
        Warm(
            line, cwd=tmp_path, env=variables | {"RANK": rank, "LOCAL_RANK": rank}, stdout=PIPE, stderr=PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    told = [rank.communicate(timeout=1500) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    (run_dir,) = (tmp_path / "outputs" / "run").iterdir()
    assert (run_dir / "total.txt").read_text() == "3.0"
    assert RunRecord.load(run_dir).status == "ok"
