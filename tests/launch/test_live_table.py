"""The table of a sweep on a terminal: it changes in place and leaves nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from terminal import Terminal

from runner.launch.sweep.live import in_place, part_of_table
from runner.launch.sweep.run import show_table
from runner.record import RunRecord
from runner.report import read_report
from runner.report.ledger import Job, Ledger

HEIGHT = 24


def write_jobs(place: Path, done: int, count: int) -> None:
    """A sweep of which the first jobs are complete, and the next one runs."""
    jobs = [Job(number, str(number), (f"optimizer.lr={number}",)) for number in range(count)]
    Ledger(tuple(jobs)).save(place)
    for job in jobs[: done + 1]:
        status = "ok" if job.number < done else "running"
        (place / str(job.number)).mkdir(exist_ok=True)
        loss = [float(abs(job.number - 3))]
        extras = {"overrides": list(job.overrides)}
        RunRecord(status=status, loss=loss, steps=1, extras=extras).save(place / str(job.number))  # type: ignore[arg-type]


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("runner")
    before = logger.handlers, logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger
    logger.handlers, logger.level, logger.propagate = before[0], before[1], before[2]


@pytest.mark.parametrize("count", [3, 60])
def test_only_log_lines_and_the_last_table_stay(count: int, tmp_path: Path, log: logging.Logger) -> None:
    terminal = Terminal(HEIGHT)
    console = Console(file=terminal, force_terminal=True, width=80, height=HEIGHT, color_system=None)
    log.handlers = [logging.StreamHandler(terminal)]
    write_jobs(tmp_path, 0, count)
    with in_place(lambda: read_report(tmp_path), console):
        for number in range(3):
            write_jobs(tmp_path, number, count)
            log.info("job %d begins", number)
            console.print(end="")  # draws the table, as its timer does
            assert any(" lr=" in line for line in terminal.lines())
    log.info("ended")
    assert [line for line in terminal.lines() if line] == [*(f"job {number} begins" for number in range(3)), "ended"]


def test_names_stay_as_they_are_while_columns_become_wider(tmp_path: Path) -> None:
    write_jobs(tmp_path, 0, 3)
    shown = []
    for metrics in ({}, {f"val_a_long_name_{number}": [[1, 0.5]] for number in range(3)}):
        extras = {"overrides": ["optimizer.lr=0"], **metrics}
        RunRecord(status="ok", loss=[1.0], extras=extras).save(tmp_path / "0")
        terminal = Terminal(HEIGHT)
        Console(file=terminal, width=80).print(part_of_table(read_report(tmp_path), HEIGHT))
        shown.append([word for line in terminal.lines() for word in line.split() if "lr=" in word])
    assert shown == [["lr=0", "lr=1", "lr=2"]] * 2


def test_where_the_log_is_a_file_it_stays_one(tmp_path: Path, log: logging.Logger) -> None:
    terminal = Terminal(HEIGHT)
    console = Console(file=terminal, force_terminal=True, width=80, height=HEIGHT)
    with (tmp_path / "log").open("w") as file:
        log.handlers = [logging.StreamHandler(file)]
        write_jobs(tmp_path, 0, 2)
        with in_place(lambda: read_report(tmp_path), console):
            log.info("job begins")
    assert (tmp_path / "log").read_text() == "job begins\n"


def test_a_long_table_shows_the_rows_around_the_job_that_runs(tmp_path: Path) -> None:
    write_jobs(tmp_path, 30, 60)
    table = part_of_table(read_report(tmp_path), HEIGHT)
    numbers = [row[0] for row in table.rows]
    assert len(numbers) <= HEIGHT - 5
    assert {"29", "30", "31"} <= set(numbers)
    assert table.notes[0] == f"jobs {numbers[0]} to {numbers[-1]} of 0 to 59"


def test_the_end_says_what_can_be_done_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates").mkdir()
    write_jobs(tmp_path / "rates", 5, 6)
    terminal = Terminal(HEIGHT)
    show_table(tmp_path / "rates", Console(file=terminal, width=80))
    shown = terminal.lines()
    assert any(line.split()[:3] == ["3", "*", "lr=3"] for line in shown)
    assert "* lowest loss of the complete runs" in shown
    assert "report        runner report rates --sort loss" in shown
    assert "best weights  runner export rates best.safetensors --best loss" in shown
