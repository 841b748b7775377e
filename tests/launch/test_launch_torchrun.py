"""Under torchrun nothing is started: the ranks agree on one directory and one verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import PIPE

import launch_helpers
import pytest
from launch_helpers import HERE, OVERRIDES, Started, command
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
from warm import Warm

from runner.config.schema import ParallelismConfig, RunConfig
from runner.launch.attach import world_size_problems
from runner.record import RunRecord

PIPELINE = (*OVERRIDES, "parallelism.pipeline=2")


def _as_torchrun_does(
    directory: Path, entry: str, *overrides: str, outputs: list[str] | None = None
) -> list[tuple[int, str]]:
    """Exit status and standard error of two processes with the variables and the store that torchrun's ranks have.

    Args:
        outputs: takes what each of them writes to standard output.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    variables |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    line, environment = command("train", *overrides, entry=entry), launch_helpers.environment()
    ranks = [
        Warm(line, cwd=directory, env={**environment, **variables, "RANK": rank, "LOCAL_RANK": rank}, stdout=PIPE,
             stderr=PIPE, text=True)
        for rank in ("0", "1")
    ]  # fmt: skip
    told = [rank.communicate(timeout=1500) for rank in ranks]
    if outputs is not None:
        outputs += [out for out, _ in told]
    return [(rank.returncode, said) for rank, (_, said) in zip(ranks, told, strict=True)]


@pytest.mark.costly
def test_a_rank_that_fails_is_named_in_the_record(tmp_path: Path) -> None:
    """By torchrun itself. The ranks share one directory, which rank 0 has made."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [str(HERE / "launch_main.py"), "train", "fake_entries:last_rank_raises", *PIPELINE]
    started = Started([*launcher, *words], tmp_path, executed=True)
    status, _, err = started.finish()
    assert started.left_behind() == []
    assert status == 1
    (run_dir,) = (tmp_path / "outputs" / "run").iterdir()
    record = RunRecord.load(run_dir)
    assert record.status == "failed"
    assert "rank 1 failed: ValueError: the user's model is broken" in str(record.reason)
    assert "rank 1 failed: ValueError" in err


def test_the_ranks_share_one_directory_that_rank_0_made(tmp_path: Path) -> None:
    outputs: list[str] = []
    assert [status for status, _ in _as_torchrun_does(tmp_path, "succeed", *PIPELINE, outputs=outputs)] == [0, 0]
    assert ["predicted | measured" in out for out in outputs] == [True, False], "one rank tells how the run ended"
    (run_dir,) = (tmp_path / "outputs" / "run").iterdir()
    assert (run_dir / "total.txt").read_text() == "3.0"
    assert RunRecord.load(run_dir).status == "ok"
    assert (run_dir / "config.yaml").exists()


@pytest.mark.costly
def test_a_rank_that_is_out_of_memory_is_told_what_needs_less(tmp_path: Path) -> None:
    (_, told) = _as_torchrun_does(tmp_path, "last_rank_is_out_of_memory", *PIPELINE, "run_dir=run")
    assert told[0] == 3
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "out_of_memory"
    assert str(record.reason).startswith("rank 1 failed: RuntimeError")
    assert str(record.extras["advice"]).startswith("predicted were ")
    assert str(record.extras["advice"]) in told[1]


def test_a_wrong_number_of_ranks_is_seen_before_any_collective(tmp_path: Path) -> None:
    for status, err in _as_torchrun_does(tmp_path, "succeed", *OVERRIDES, "parallelism.pipeline=3"):
        assert status == 2
        assert "parallelism = 3 x 1 x 1: the product of the degrees, 3, must be the number of ranks, 2" in err
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_by_rank_0_reaches_all(tmp_path: Path) -> None:
    for status, err in _as_torchrun_does(tmp_path, "succeed", *PIPELINE, "memory_limit=1000"):
        assert status == 3
        assert "memory_limit" in err
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
