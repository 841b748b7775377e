"""Under torchrun nothing is started: the ranks agree on one directory and one verdict."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch_helpers import HERE, OVERRIDES, Started

from runner.config.schema import ParallelismConfig, RunConfig
from runner.launch.attach import world_size_problems
from runner.record import RunRecord

PIPELINE = (*OVERRIDES, "parallelism.pipeline=2")


def _torchrun(directory: Path, entry: str, *overrides: str) -> tuple[int, str, str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(HERE / "launch_main.py"), "train", f"fake_entries:{entry}", *overrides]
    started = Started(command, directory, executed=True)
    result = started.finish()
    assert started.left_behind() == []
    return result


@pytest.mark.full
def test_the_ranks_share_one_directory_that_rank_0_made(tmp_path: Path) -> None:
    status, _, err = _torchrun(tmp_path, "succeed", *PIPELINE)
    assert status == 0, err
    (run_dir,) = (tmp_path / "outputs" / "run").iterdir()
    assert (run_dir / "total.txt").read_text() == "3.0"
    assert RunRecord.load(run_dir).status == "ok"
    assert (run_dir / "config.yaml").exists()


@pytest.mark.slow
def test_a_rank_that_fails_is_named_in_the_record(tmp_path: Path) -> None:
    status, _, err = _torchrun(tmp_path, "last_rank_raises", *PIPELINE, "run_dir=run")
    assert status == 1
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "failed"
    assert "rank 1 failed: ValueError: the user's model is broken" in str(record.reason)
    assert "rank 1 failed: ValueError" in err


@pytest.mark.full
def test_a_rank_that_is_out_of_memory_is_told_what_needs_less(tmp_path: Path) -> None:
    _, _, err = _torchrun(tmp_path, "last_rank_is_out_of_memory", *PIPELINE, "run_dir=run")
    assert "exitcode  : 3" in err
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "out_of_memory"
    assert str(record.reason).startswith("rank 1 failed: RuntimeError")
    assert str(record.extras["advice"]).startswith("predicted were ")
    assert str(record.extras["advice"]) in err


@pytest.mark.slow
def test_a_wrong_number_of_ranks_is_seen_before_any_collective(tmp_path: Path) -> None:
    status, _, err = _torchrun(tmp_path, "succeed", *OVERRIDES, "parallelism.pipeline=3")
    assert status == 1  # torchrun's own
    assert "parallelism = 3 x 1 x 1: the product of the degrees, 3, must be the number of ranks, 2" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_refusal_by_rank_0_reaches_all(tmp_path: Path) -> None:
    _, _, err = _torchrun(tmp_path, "succeed", *PIPELINE, "memory_limit=1000")
    assert "memory_limit" in err
    assert "exitcode  : 3" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("degrees", "world_size", "fix"),
    [((2, 1, 1), 2, None), ((2, 1, 1), 8, "parallelism.data=4"), ((3, 1, 1), 4, "")],
)
def test_world_size_is_compared_with_the_degrees(
    degrees: tuple[int, int, int], world_size: int, fix: str | None
) -> None:
    pipeline, data, tensor = degrees
    config = RunConfig(parallelism=ParallelismConfig(pipeline=pipeline, data=data, tensor=tensor))
    problems = world_size_problems(config, world_size)
    assert [problem.fix for problem in problems] == ([] if fix is None else [fix])
