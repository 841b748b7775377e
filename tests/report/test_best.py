"""The best run of a sweep: marked in the table, first in its order, exported by its figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.cli.main import main
from runner.errors import RequestError
from runner.record import RunRecord
from runner.report import read_report, report
from runner.report.best import best_of, figure_of
from runner.report.ledger import Job, Ledger
from runner.report.order import in_order
from runner.report.tables import runs_table

LOSSES = [0.5, math.nan, 0.125, 0.25]
VALIDATIONS = [0.75, 0.5, 1.5, 0.25]


def write(place: Path, *, validated: bool = True, **changes: Any) -> Path:
    """Jobs 0 to 3 are complete; job 4 has the lowest losses, and runs."""
    jobs = [Job(number, str(number), (f"optimizer.lr={number / 8}",)) for number in range(5)]
    place.mkdir(exist_ok=True)
    Ledger(tuple(jobs)).save(place)
    for job, loss, value in zip(jobs, [*LOSSES, 0.0], [*VALIDATIONS, 0.0], strict=True):
        run_dir = place / str(job.number)
        run_dir.mkdir()
        record = RunRecord(
            status="running" if job.number == 4 else "ok",
            config={"optimizer": {"lr": job.number / 8}},
            steps=1,
            loss=[loss],
            val_loss=[[1, 9.0], [2, value]] if validated else [],
            samples_per_second=float(job.number),
            extras={"overrides": list(job.overrides)},
        )
        record.replace(**changes).save(run_dir)
        save_file({"number": torch.tensor(job.number)}, run_dir / "weights.safetensors")
    return place


def numbers(place: Path, column: str) -> list[str]:
    return [run.name for run in in_order(read_report(place), column).runs]


def test_the_best_is_the_complete_run_with_the_lowest_last_validation(tmp_path: Path) -> None:
    runs = read_report(write(tmp_path / "s")).runs
    assert figure_of(runs) == "val_loss"
    best, by_loss = best_of(runs, "val_loss"), best_of(runs, "loss")
    assert best is runs[3]
    assert by_loss is runs[2]


def test_without_validations_the_loss_decides(tmp_path: Path) -> None:
    table = runs_table(read_report(write(tmp_path / "s", validated=False)))
    assert [row[0] for row in table.rows] == ["0", "1", "2 *", "3", "4"]
    assert table.notes[0] == "* lowest loss of the complete runs"
    assert [row[0] for row in table.values] == ["0", "1", "2", "3", "4"], "the CSV has plain numbers"


def test_one_run_is_not_the_best(tmp_path: Path) -> None:
    table = runs_table(read_report(write(tmp_path / "s", status="failed")))
    assert [row[0] for row in table.rows] == ["0", "1", "2", "3", "4"]


def test_orders(tmp_path: Path) -> None:
    place = write(tmp_path / "s")
    assert numbers(place, "val_loss") == numbers(place, "val loss") == ["4", "3", "1", "0", "2"]
    assert numbers(place, "loss") == ["4", "2", "3", "0", "1"], "what is not known stands at the end"
    assert numbers(place, "samples_per_second") == ["4", "3", "2", "1", "0"]
    assert numbers(place, "status") == ["0", "1", "2", "3", "4"]
    assert numbers(place, "optimizer.lr") == ["0", "1", "2", "3", "4"]
    assert numbers(place, "step") == ["0", "1", "2", "3", "4"]
    with pytest.raises(RequestError, match=r"--sort = val_los: there is no such column\..* Try --sort val_loss\."):
        in_order(read_report(place), "val_los")


def test_values_go_with_their_runs(tmp_path: Path) -> None:
    found = in_order(read_report(write(tmp_path / "s")), "val_loss")
    assert found.differing["optimizer.lr"] == (0.5, 0.375, 0.125, 0.0, 0.25)


def test_the_command_sorts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write(tmp_path / "s")
    assert main(["report", str(place), "--sort", "val_loss"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " lr=" in line]
    assert shown == ["4", "3", "1", "0", "2"]


def test_the_best_weights_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, file = write(tmp_path / "s"), tmp_path / "best.safetensors"
    assert main(["export", str(place), str(file), "--best", "val_loss"]) == 0
    assert load_file(file)["number"] == 3
    assert "job 3, val_loss 0.25: optimizer.lr=0.375\n" in capsys.readouterr().out
    assert main(["export", str(place), str(file), "--best", "loss"]) == 0
    assert load_file(file)["number"] == 2


@pytest.mark.parametrize(
    ("directory", "best", "said"),
    [
        ("s", (), "RUN_DIR = s: must be a run's directory or have --best. It is a sweep of 5 jobs. Try runner ex"),
        ("s", ("--best", "val_los"), "--best = val_los: must be one of val_loss, loss. Try --best val_loss."),
        ("s/0", ("--best", "loss"), "--best = loss: belongs to a sweep. s/0 is no sweep's directory"),
        ("t", ("--best", "val_loss"), "--best = val_loss: must be a figure that jobs have. No job of the sweep is"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported(
    directory: str,
    best: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("s"))
    write(Path("t"), validated=False)
    assert main(["export", directory, "x.safetensors", *best]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not Path("x.safetensors").exists()


def test_legends_name_overrides_and_cover_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **kwargs: drawn.update({Path(path).stem: figure}))
    report(write(tmp_path / "s", seconds={"compute": 1.0, "bubble": 0.5}, peak_memory_bytes={"measured": [1.0, 2.0]}))
    assert drawn.keys() == {"loss", "step_seconds", "memory", "loss_by_optimizer.lr"}
    for figure in drawn.values():
        figure.canvas.draw()
        (legend,), (axes,) = figure.legends, figure.axes
        below, plot = legend.get_window_extent(), axes.get_tightbbox()
        assert plot is not None
        assert not below.overlaps(plot)
        assert below.y0 >= 0
        assert below.x0 >= 0
        assert below.x1 <= figure.bbox.x1
    names = [text.get_text() for text in drawn["loss"].legends[0].get_texts()]
    assert names == [*(f"{number}: optimizer.lr={number / 8}" for number in range(5)), "validation"]
    assert [label.get_text() for label in drawn["step_seconds"].axes[0].get_yticklabels()] == names[:-1]
