"""SIGKILL anywhere in a run: nothing is lost but the steps since the last save, no process stays, and it goes on."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from processes import left_behind
from resume_runs import assert_same_run, record_of, train

EVERY = 2
MOST = {"step": 12, "validation": 6, "save": 9, "write": 4}  # three micro-batches a step, three parts a save


def draw(count: int, *, in_parts: bool, seed: int) -> list[str]:
    """``count`` places for each of two ranks; of a whole checkpoint only rank 0 writes."""
    drawn = random.Random(seed)
    places = []
    for number in range(2 * count):
        rank = number % 2
        phase = drawn.choice([name for name in MOST if name != "write" or in_parts or rank == 0])
        places.append(f"{rank} {phase} {drawn.randint(1, MOST[phase])}")
    return places


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("in_parts", [True, False])
def test_a_rank_is_killed_anywhere(in_parts: bool, half: int, tmp_path: Path) -> None:
    count = 5  # of each rank, so that in both forms and halves together it is killed at twenty points
    places = draw(count, in_parts=in_parts, seed=4 + in_parts + 2 * half)
    request = (
        "parallelism.pipeline=2", "partition=uniform", "model.target=killing:model",
        f"trainer.max_steps={8 + 4 * count}", "trainer.val_every=3", f"checkpoint.every={EVERY}", "checkpoint.keep=2",
        f"checkpoint.asynchronous={str(in_parts).lower()}",
    )  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = train(whole, *request, f"+model.kwargs.run={whole}", seconds=280)
    assert done.returncode == 0, done.stderr
    broken.mkdir()
    (broken / "places").write_text("\n".join(places))
    restarts = f"launcher.max_restarts={len(places)}"
    done = train(broken, *request, f"+model.kwargs.run={broken}", "resume=auto", restarts, seconds=3000)
    assert done.returncode == 0, done.stderr
    assert left_behind(tmp_path) == []
    killed = [line.split() for line in (broken / "killed").read_text().splitlines()]
    assert [" ".join(place[:3]) for place in killed] == places
    assert done.stderr.count("died: SIGKILL") == len(places)
    assert record_of(broken)["restarts"] == len(places)
    assert_same_run(whole, broken)
    assert list((broken / "checkpoints").rglob(".unfinished*")) == []
    resumed = [int(step) for step in re.findall(r"continuing after step (\d+) of", done.stderr)]
    begun = len(places) - len(resumed)  # killed before a first save
    lost = [int(place[3]) - step for place, step in zip(killed[begun:], resumed, strict=True)]
    under_way = EVERY if in_parts else 0  # a save that is being written while the next steps are taken
    assert max(lost, default=0) <= EVERY + under_way
    assert all(int(place[3]) <= EVERY + under_way for place in killed[:begun])
