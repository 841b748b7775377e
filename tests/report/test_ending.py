"""The last lines of a run."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from runner.launch.run.start import _show
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


def test_one_stage_has_no_bubble() -> None:
    one, two = (RunRecord(layout={"pipeline": stages, "data": 3}) for stages in (1, 2))
    assert [row.name for row in predicted_measured(one)] == ["step"]
    assert [row.name for row in predicted_measured(two)] == ["step", "bubble ratio"]


def test_results_keep_to_the_terminals_width_and_paths_stay_whole(tmp_path: Path) -> None:
    metrics = {f"val_metric_{number}": [[2, 0.5]] for number in range(4)}
    run_dir = tmp_path / ("long" * 30)
    run_dir.mkdir()
    record = RunRecord(status="ok", loss=[1.5], val_loss=[[2, 1.25]], artifacts={"weights": "w"}, extras=metrics)
    record.save(run_dir)
    text = io.StringIO()
    _show(run_dir, 3.0, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert f"weights  {run_dir}/w" in lines
    long = [line for line in lines if len(line) > 80]
    assert all(str(run_dir) in line for line in long)
    assert [name for name in metrics if f"{name} 0.5000" not in " ".join(text.getvalue().split())] == []
