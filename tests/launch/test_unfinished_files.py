"""What a killed writer left beside a run's files is gone after the next start."""

from __future__ import annotations

from pathlib import Path

from runner.config.compose.resolve import resolve
from runner.files import new_file_beside, remove_unfinished
from runner.launch.failure import error_file
from runner.launch.run.prepare import prepare, write_request


def test_only_what_writers_of_these_files_left_is_removed(tmp_path: Path) -> None:
    for name in ("record.json", "config.yaml"):
        new_file_beside(tmp_path / name)
    for name in (".hidden", "record.json", ".1-record.json", ".netrc-1-2-record.json"):
        (tmp_path / name).touch()
    before = {path.name for path in tmp_path.iterdir()}
    remove_unfinished(tmp_path, ["record.json"])
    (removed,) = before - {path.name for path in tmp_path.iterdir()}
    assert removed.endswith("-0-record.json")


def test_the_next_start_removes_what_killed_ranks_left_of_their_reports(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = resolve(["model=mlp", "trainer.max_steps=1", f"run_dir={run_dir}"])
    plan = prepare(config)
    run_dir.mkdir()
    (run_dir / "logs").mkdir()
    new_file_beside(error_file(run_dir, 0))
    write_request(config, plan, run_dir, command="a test")
    assert list((run_dir / "logs").iterdir()) == []
