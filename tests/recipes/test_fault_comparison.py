"""The comparison of launchers under kills: what all are told, what is counted, and a race of few steps."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

from runner.recipes.faults.compare.__main__ import Outcome, markdown
from runner.recipes.faults.compare.race import Race, begins, done_twice, ended, kills, recoveries


def race_in(folder: Path) -> Race:
    return Race(str(folder), steps=6, every=2, seconds=0.0, ranks=2, kills=((3, 1), (5, 0)))


def test_all_contenders_meet_the_same_kills() -> None:
    made = kills(4, steps=30, ranks=3, seed=5)
    assert made == kills(4, steps=30, ranks=3, seed=5) != kills(4, steps=30, ranks=3, seed=6)
    assert len({step for step, _ in made}) == 4
    assert all(1 < step <= 30 and 0 <= rank < 3 for step, rank in made)


def test_a_race_is_read_as_it_was_written(tmp_path: Path) -> None:
    race = race_in(tmp_path)
    assert Race.load(race.save()) == race


def _rank(race: Race) -> None:
    for step in range(1, 5):
        begins(race, 1, step)
        ended(race, 0, step)


def test_a_rank_is_killed_once_at_each_of_its_steps(tmp_path: Path) -> None:
    race = race_in(tmp_path)
    for status in (-signal.SIGKILL, 0):
        process = multiprocessing.get_context("fork").Process(target=_rank, args=(race,))
        process.start()
        process.join()
        assert process.exitcode == status
    assert done_twice(race) == (4, 2), "steps 1 and 2 were done again"
    (waited,) = recoveries(race)
    assert 0 < waited < 60, "from the kill at step 3 to the end of step 1 of the second process"


def test_a_recovery_lasts_from_the_kill_to_the_end_of_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "killed-3").write_text("100.0")
    (tmp_path / "killed-5").write_text("120.0")
    assert recoveries(race_in(tmp_path)) == []
    (tmp_path / "ended.txt").write_text("1 98.0\n2 100.1\n2 104.5\n3 105.0\n4 120.2\n5 121.0\n")
    assert recoveries(race_in(tmp_path)) == [1.0, 4.5], "steps 2 and 4 were under way at the kills"


def test_who_does_not_get_there_is_told() -> None:
    made = markdown([Outcome("a", 1.25, 1, 6, 2, 2.5), Outcome("b", None, 3, 4, 1)], "title")
    assert "| a | 1.2 | 2.5 s | 1 | 6 | 2 |" in made
    assert "| b | not finished |  | 3 | 4 | 1 |" in made
