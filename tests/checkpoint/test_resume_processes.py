"""As :mod:`test_resume`, in new processes of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resume_runs import assert_same_run, train

from runner.checkpoint.file import read_checkpoint

LAYOUT = ("schedule=1f1b", "parallelism.pipeline=2", "parallelism.data=2")


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}.ckpt"


@pytest.mark.costly
def test_every_replica_goes_on_with_its_own_running_statistics(tmp_path: Path) -> None:
    """Validation uses each replica's, so that its loss shows them."""
    few = ["schedule.microbatches=1", "trainer.max_steps=8"]  # batch norm needs two samples
    request = [*LAYOUT, "model.target=resume_zoo:normed", *few]
    whole = tmp_path / "whole"
    assert train(whole, *request).returncode == 0
    saved = read_checkpoint(checkpoint(whole, 3))
    (first, second) = (saved["state_dict"], saved["replica_buffers"][1])
    assert {name.split(".")[-1] for name in second} == {"running_mean", "running_var", "num_batches_tracked"}
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])
    done = train(tmp_path / "resumed", *request, f"resume={checkpoint(whole, 3)}")
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, tmp_path / "resumed")
    ours, theirs = (read_checkpoint(checkpoint(place, 8)) for place in (tmp_path / "resumed", whole))
    expected = theirs["replica_buffers"][1]
    assert [name for name in expected if not torch.equal(ours["replica_buffers"][1][name], expected[name])] == []
