"""A bit that flips in a file is damage or does no harm; it never ends the start by an error of its own."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
import torch

from runner.checkpoint.file import CheckpointError, damage_of, read_checkpoint, write_checkpoint
from runner.launch.run.resume import continue_record
from runner.record import RunRecord, StepLog, read_steps


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-2.ckpt"
    weights = {"a.weight": torch.arange(12.0), "b.weight": torch.ones(3, dtype=torch.float64)}
    write_checkpoint({"state_dict": weights, "global_step": 2}, path)
    return path


def test_no_flipped_bit_of_a_whole_checkpoint_is_an_error_of_its_own(checkpoint: Path) -> None:
    """The table of contents holds names and places in the file, and no sum covers it."""
    content = checkpoint.read_bytes()
    with zipfile.ZipFile(checkpoint) as archive:
        table = archive.start_dir
    chance, good, seen = random.Random(5), read_checkpoint(checkpoint), 0
    expected = {name: value.clone() for name, value in good["state_dict"].items()}
    for _ in range(250):
        changed = bytearray(content)
        changed[chance.randrange(table, len(content))] ^= 1 << chance.randrange(8)
        checkpoint.write_bytes(changed)
        if damage_of(checkpoint) is not None:
            seen += 1
            continue
        try:
            found = read_checkpoint(checkpoint)["state_dict"]
        except CheckpointError:  # torch reads memory beyond a record whose length has changed, and takes what is there
            continue
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert seen > 50


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"step": 2, "lo\xf3s": 2.0, "seconds": 0.5}',
        b'{"stdp": 2, "loss": 2.0, "seconds": 0.5}',
        b"[2]",
        b'{"step": 4}',
    ],
)
def test_a_damaged_line_of_the_steps_is_none_and_those_after_it_neither(damaged: bytes, tmp_path: Path) -> None:
    lines = [b'{"step": %d, "loss": %d.0, "seconds": 0.5}' % (step, step) for step in (1, 2, 3)]
    (tmp_path / "steps.jsonl").write_bytes(b"\n".join([lines[0], damaged, lines[2]]) + b"\n")
    assert [line["step"] for line in read_steps(tmp_path)] == [1]
    StepLog(tmp_path, 3).close()
    assert len((tmp_path / "steps.jsonl").read_bytes().splitlines()) == 1


def test_a_changed_digit_of_the_steps_is_written_again_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.config.schema import RunConfig
    from runner.training import resume

    with StepLog(tmp_path) as log:
        for step, loss in ((1, 0.5), (2, 0.75), (3, 0.25), (4, 0.125)):
            log.write(step=step, loss=loss, seconds=1.0)
    file = tmp_path / "steps.jsonl"
    file.write_text(file.read_text().replace("0.75", "0.35"))
    history = resume.History(loss=(0.5, 0.75, 0.25), seconds=(1.0, 1.0, 1.0))
    progress = resume.Progress(3, 3, 6, history, {}, {}, "")
    monkeypatch.setattr(resume, "read_progress", lambda path: (progress, {}))
    made = continue_record(RunRecord(), RunConfig(resume="step-3.ckpt"), tmp_path)
    assert made.loss == [0.5, 0.75, 0.25]
    assert [line["loss"] for line in read_steps(tmp_path)] == [0.5, 0.75, 0.25]
