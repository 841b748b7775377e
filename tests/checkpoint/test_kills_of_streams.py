"""SIGKILL in runs whose ranks hold several copies of their weights: they go on bit for bit from the last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from covering import sampled
from resume_runs import assert_same_run, record_of, train

EVERY = 3
LAYOUTS = {
    "pipedream": ("schedule=pipedream", "schedule.microbatches=1"),
    "pipedream_2bw": ("schedule=pipedream_2bw", "schedule.microbatches=2"),
    "pipemare": ("schedule=pipemare", "schedule.microbatches=1"),
    "avgpipe": ("schedule=avgpipe", "schedule.microbatches=4"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sampled(LAYOUTS, "avgpipe"))
def test_a_killed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Rank 0 is killed in its eighth forward or later, rank 1 after that; both within a run of nine steps."""
    request = (
        *LAYOUTS[name], "parallelism.pipeline=2", "partition=uniform", "model.target=killing:model",
        "trainer.max_steps=9", "trainer.grad_clip_norm=null", f"checkpoint.every={EVERY}", "checkpoint.keep=9",
    )  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = train(whole, *request, f"+model.kwargs.run={whole}")
    assert done.returncode == 0, done.stderr
    broken.mkdir()
    places = ["0 step 5", "1 step 4"]
    (broken / "places").write_text("\n".join(places))
    done = train(broken, *request, f"+model.kwargs.run={broken}", "resume=auto", f"launcher.max_restarts={len(places)}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("died: SIGKILL") == record_of(broken)["restarts"] == len(places)
    assert_same_run(whole, broken)
