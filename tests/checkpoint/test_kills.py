"""SIGKILL anywhere in a run: nothing is lost but the steps since the last save, no process stays, and it goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import left_behind
from resume_runs import assert_same_run, record_of, train

EVERY = 2
CASES = {  # what is asked for, and the places; three micro-batches are a step, three parts a save
    "in parts": (
        ("schedule=1f1b", f"checkpoint.every={EVERY}", "checkpoint.keep=2", "checkpoint.asynchronous=true"),
        ("0 step 8", "1 validation 2", "0 write 3", "1 save 4"),
    ),
    "by time": (
        ("schedule=avgpipe", "schedule.microbatches=4", "trainer.grad_clip_norm=null", "checkpoint.every=null",
         "checkpoint.every_seconds=0.000001", "checkpoint.keep=1"),
        ("1 step 20", "0 step 8"),
    ),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
def test_a_rank_is_killed_anywhere(name: str, tmp_path: Path) -> None:
    """The first command may restart once less than it would need; the same command, given again, goes on."""
    words, places = CASES[name]
    request = (
        *words, "parallelism.pipeline=2", "partition=uniform", "model.target=killing:model", "trainer.max_steps=14",
        "trainer.val_every=3",
    )  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = train(whole, *request, f"+model.kwargs.run={whole}")
    assert done.returncode == 0, done.stderr
    broken.mkdir()
    (broken / "places").write_text("\n".join(places))
    restarts = f"launcher.max_restarts={len(places) - 1}"
    done = train(broken, *request, f"+model.kwargs.run={broken}", "resume=auto", restarts)
    assert done.returncode == 1, done.stderr
    assert left_behind(tmp_path) == []
    killed = [line.split() for line in (broken / "killed").read_text().splitlines()]
    assert [" ".join(place[:3]) for place in killed] == list(places)
    assert done.stderr.count("died: SIGKILL") >= len(places)
    record = record_of(broken)
    assert (record["status"], record["restarts"]) == ("failed", len(places) - 1)
    again = train(broken, *request, f"+model.kwargs.run={broken}", "resume=auto", restarts)
    assert again.returncode == 0, again.stderr
    assert_same_run(whole, broken)
    assert list((broken / "checkpoints").rglob(".unfinished*")) == []
    told = done.stderr + again.stderr
    resumed = [int(step) for step in re.findall(r"continuing after step (\d+) of", told)]
    begun = len(places) - len(resumed)  # killed before a first save
    lost = [int(place[3]) - step for place, step in zip(killed[begun:], resumed, strict=True)]
    assert resumed, "no start went on"
    if name == "in parts":  # one save may be under way while the next steps are taken
        assert max(lost) <= 2 * EVERY
        assert all(int(place[3]) <= 2 * EVERY for place in killed[:begun])
