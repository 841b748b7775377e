"""A run resumes in a stream that can say its place: with the same bits, and without reading what was read before."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_runs import assert_same_run, record_of, run_here, train

STREAM = ("data.target=stream_zoo:stream", "data.batch_size=8", "lr_scheduler.total_steps=14")


def read_again(file: Path, before: int) -> list[int]:
    """Numbers below ``before`` that were read; the first sample of all tells a plan the shapes."""
    return [number for number in map(int, file.read_text().split()) if 0 < number < before]


@pytest.mark.costly
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has 13 steps, of which the last one is short; the resumed run reads the next epoch's first samples."""
    saving = "checkpoint.asynchronous=true"
    run_here(monkeypatch, tmp_path / "whole", *STREAM, "trainer.max_steps=14", saving)
    run_here(monkeypatch, tmp_path / "parted", *STREAM, "trainer.max_steps=10", saving)
    monkeypatch.setenv("NUMBERS_READ", str(tmp_path / "read"))
    run_here(monkeypatch, tmp_path / "parted", *STREAM, "trainer.max_steps=14", saving, "resume=auto")
    assert_same_run(tmp_path / "whole", tmp_path / "parted")
    assert [number for number in read_again(tmp_path / "read", 80) if number >= 24] == []


@pytest.mark.costly
def test_it_goes_on_with_other_replicas_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that load data compare the first sample of all before they start."""
    request = (*STREAM, "model.target=stream_zoo:model")
    run_here(monkeypatch, tmp_path / "whole", *request, "trainer.max_steps=12")
    run_here(monkeypatch, tmp_path / "parted", *request, "trainer.max_steps=5")
    monkeypatch.delenv("RANK")
    split = ("parallelism.data=2", "schedule.microbatches=2", "data.workers=2")
    monkeypatch.setenv("NUMBERS_READ", str(tmp_path / "read"))
    again = train(tmp_path / "parted", *request, *split, "trainer.max_steps=12", "resume=auto")
    assert again.returncode == 0, again.stderr
    expected, found = (record_of(tmp_path / name)["loss"] for name in ("whole", "parted"))
    assert found == pytest.approx(expected, rel=1e-5)
    ahead = 32  # the rehearsal takes the first step of all, and its loader's workers read four steps ahead
    assert [number for number in read_again(tmp_path / "read", 40) if number > ahead] == []
