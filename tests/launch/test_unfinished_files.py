"""What a killed writer left beside a run's files is gone after the next start."""

from __future__ import annotations

from pathlib import Path

from runner.files import new_file_beside, remove_unfinished


def test_only_what_writers_of_these_files_left_is_removed(tmp_path: Path) -> None:
    for name in ("record.json", "config.yaml"):
        new_file_beside(tmp_path / name)
    for name in (".hidden", "record.json", ".1-record.json", ".netrc-1-2-record.json"):
        (tmp_path / name).touch()
    before = {path.name for path in tmp_path.iterdir()}
    remove_unfinished(tmp_path, ["record.json"])
    (removed,) = before - {path.name for path in tmp_path.iterdir()}
    assert removed.endswith("-0-record.json")
