"""A job that no node of the cluster can ever hold is refused, instead of waiting in the queue for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.launch.slurm.capacity import too_large
from runner.launch.slurm.submit import submit

TWO_KINDS = {"main*": [4, 4], "big": [64]}
SBATCH = """#!/bin/sh
[ "$1" = --test-only ] || exit 9
grep -q -- '--cpus-per-task=1$' && exit 0
echo "allocation failure: Requested node configuration is not available" >&2
exit 1
"""


def _lines(*overrides: str) -> list[str]:
    config = resolve(["model=mlp", "launcher=slurm", *overrides])
    return [problem.line() for problem in too_large(config, TWO_KINDS)]


def test_what_fits_one_of_the_partitions_is_no_problem() -> None:
    assert _lines("launcher.cpus_per_task=4") == []
    assert _lines("launcher.cpus_per_task=64", "launcher.partition='main,big'") == []
    assert _lines("launcher.cpus_per_task=64", "launcher.partition=unknown") == []


def test_more_cpus_or_nodes_than_there_are() -> None:
    (alone,) = _lines("launcher.cpus_per_task=64")
    assert alone == (
        "launcher.cpus_per_task = 64: must be at most 4. SLURM would keep the job in its queue for ever: every node "
        "would run a rank of 64 CPUs, and no node of the partition main has more than 4. Try launcher.cpus_per_task=4."
    )
    (together,) = _lines("launcher.cpus_per_task=3", "parallelism.pipeline=2")
    assert "must be at most 2." in together
    (crowded,) = _lines("parallelism.data=8")
    assert "8 ranks must not be on one node" in crowded
    nodes = _lines("launcher.nodes=6", "parallelism.data=6", "launcher.partition=main")
    assert nodes == [
        "launcher.nodes = 6: must be at most 2. SLURM would keep the job in its queue for ever: the partition main has "
        "no more nodes. Try launcher.nodes=2."
    ]


def test_it_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"sbatch": SBATCH, "sinfo": "#!/bin/sh\necho 'main* 4'\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(RequestError, match=r"launcher.cpus_per_task = 64: must be at most 4\."):
        submit(resolve(["model=mlp", "launcher=slurm", "launcher.cpus_per_task=64"]), command="a test")
    assert list(work.iterdir()) == []
