"""The last lines of a run."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from runner.launch.run.show import show
from runner.record import RunRecord
from runner.report.ending import files, results
from runner.report.tables import predicted_measured
from runner.training.measure.spent import Spent


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
    assert results(record) == ["3 steps, loss 1.5000, best validation 1.2500 after step 2"]
    assert files(record, Path("outputs/a b")) == [
        "weights          outputs/a b/weights.safetensors",
        "best checkpoint  outputs/a b/checkpoints/step-2.ckpt",
        "report           runner report 'outputs/a b'",
    ]


def test_a_run_without_steps_has_no_loss() -> None:
    assert results(RunRecord()) == ["0 steps"]
    assert files(RunRecord(), Path("run")) == ["report  runner report run"]


def test_the_time_of_a_run_is_told_by_parts_each_second_once() -> None:
    seconds = {"planning": 4.0, "start": 2.0, "num_steps": 20, "num_counted": 3, "rehearsal": 1.5, "counted_steps": 0.9}
    seconds |= {"steps": 5.5, "validation": 0.0, "saving": 0.25}
    memory = {"kind": "tensor_bytes", "process": [400_000_000, 412_000_000], "measured": [1, 2], "predicted": [1, 2]}
    record = RunRecord(steps=20, extras={"run_seconds": seconds}, peak_memory_bytes=memory)
    assert results(record)[1:] == [
        "14.2 s in all: planning 4 s, start and end 2 s, rehearsal 1.5 s, 3 steps that count memory 900 ms, "
        "17 steps 5.5 s, saving 250 ms",
        "peak memory is that of tensors; the largest process had 412 MB, with Python and its packages",
    ]
    assert len(results(record.replace(peak_memory_bytes=memory | {"kind": "cuda_allocated"}))) == 2


def test_parts_of_the_time_add_up_whatever_is_within_what() -> None:
    now = 0.0
    spent = Spent(lambda: now)
    for seconds, part in ((5, "rehearsal"), (2, "steps"), (10, "validation"), (3, "steps")):
        now += seconds
        spent.enter(part)
    now += 1
    with spent.within("saving"):
        now += 4
    now += 2
    assert spent.seconds() == {"rehearsal": 2, "steps": 10 + 1 + 2, "validation": 3, "saving": 4}


def test_one_stage_has_no_bubble() -> None:
    one, two = (RunRecord(layout={"pipeline": stages, "data": 3}) for stages in (1, 2))
    assert [row.name for row in predicted_measured(one)] == ["step"]
    assert [row.name for row in predicted_measured(two)] == ["step", "bubble ratio"]


def test_results_keep_to_the_terminals_width_and_paths_stay_whole(tmp_path: Path) -> None:
    metrics = {f"val_metric_{number}": [[2, 0.5]] for number in range(4)}
    run_dir = tmp_path / ("long" * 30)
    run_dir.mkdir()
    record = RunRecord(status="ok", loss=[1.5], val_loss=[[2, 1.25]], artifacts={"weights": "w"}, extras=metrics)
    text = io.StringIO()
    show(record, run_dir, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert f"weights  {run_dir}/w" in lines
    long = [line for line in lines if len(line) > 80]
    assert all(str(run_dir) in line for line in long)
    assert [name for name in metrics if f"{name} 0.5000" not in " ".join(text.getvalue().split())] == []
