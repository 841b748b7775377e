"""All machines of a run must see the run directory that rank 0 has made."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__

from runner.errors import RequestError
from runner.launch import attach
from runner.record import RunRecord


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(attach, "_SEEING_SECONDS", 0.5)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        RunRecord().save(tmp_path / name)
    return tmp_path / "here", tmp_path / "there"


def refusals(*run_dirs: Path) -> list[str]:
    """What each rank refuses with; empty if it does not. The ranks see these directories at the same path."""
    store, said = HashStore(), dict.fromkeys(range(len(run_dirs)), "")

    def meet(rank: int) -> None:
        try:
            attach._meet(store, rank, run_dirs[rank])
        except RequestError as error:
            said[rank] = error.problems[0].line()

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return list(said.values())


def test_every_rank_refuses_a_directory_that_one_does_not_see(places: tuple[Path, Path]) -> None:
    here, there = places
    first, second = refusals(here, there)
    for said in (first, second):
        assert "must be a directory that all machines of the run see. rank 1 on " in said
    record = RunRecord.load(here)
    assert (record.status, record.reason) == ("failed", first)


def test_a_common_directory_is_left_as_it_was(places: tuple[Path, Path]) -> None:
    here, _ = places
    before = sorted(here.iterdir())
    assert refusals(here, here) == ["", ""]
    assert sorted(here.iterdir()) == before
    assert RunRecord.load(here).status == "running"
