"""The last lines of a run."""

from __future__ import annotations

from pathlib import Path

from runner.record import RunRecord
from runner.report.ending import ending
from runner.report.tables import predicted_measured


def test_it_tells_the_results_and_where_the_files_are() -> None:
    record = RunRecord(
        status="ok",
        steps=3,
        loss=[3.0, 2.0, 1.5],
        val_loss=[[1, 2.5], [2, 1.25], [3, float("nan")]],
        artifacts={
            "weights": "weights.safetensors",
            "steps": "steps.jsonl",
            "best_checkpoint": "checkpoints/step-2.ckpt",
        },
    )
    assert ending(record, Path("outputs/a b"), 83.4) == [
        "3 steps in 83.4 s, loss 1.5000, best validation 1.2500 after step 2",
        "weights          outputs/a b/weights.safetensors",
        "best checkpoint  outputs/a b/checkpoints/step-2.ckpt",
        "report           runner report 'outputs/a b'",
    ]


def test_a_run_without_steps_has_no_loss() -> None:
    assert ending(RunRecord(), Path("run"), 0.5) == ["0 steps in 500 ms", "report  runner report run"]


def test_one_rank_has_no_bubble() -> None:
    one, two = (RunRecord(layout={"world_size": ranks}) for ranks in (1, 2))
    assert [row.name for row in predicted_measured(one)] == ["step"]
    assert [row.name for row in predicted_measured(two)] == ["step", "bubble ratio"]
