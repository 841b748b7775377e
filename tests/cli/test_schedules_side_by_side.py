"""``runner schedule`` with several values of a key, its costs, and the width of what it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from runner.cli.main import main
from runner.errors import EXIT_WRONG_REQUEST
from runner.schedule import build

FOUR = ("parallelism.pipeline=4", "schedule.microbatches=8")


@pytest.fixture(autouse=True)
def _narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["schedule", *words, *FOUR]) == 0
    return capsys.readouterr().out.splitlines()


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads("\n".join(shown(capsys, *words, "--json")))


def test_both_parts_of_a_backward_take_half_of_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    whole = document(capsys, "schedule=zb_h1", "cost.B=2.2")
    assert whole["costs"] == {"F": 1, "B": 2.2, "I": 1.1, "W": 1.1, "comm": 0}
    given = document(capsys, "schedule=zb_h1", "cost.B=2.2", "cost.W=0.9")
    assert (given["costs"]["I"], given["costs"]["W"]) == (1.1, 0.9)
    assert document(capsys, "schedule=zb_h1")["costs"]["I"] == 1


def test_several_are_drawn_on_one_time_scale(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "schedule=gpipe,zb_h1", "cost.B=4")
    titles = [line for line in lines if "micro-batches" in line]
    assert titles == ["gpipe: 4 ranks, 8 micro-batches, F 1, B 4", "zb_h1: 4 ranks, 8 micro-batches, F 1, I 2, W 2"]
    gpipe, zb_h1 = (lines[lines.index(title) + 1] for title in titles)
    assert gpipe.startswith("r0   |01234567")
    assert len(gpipe) == len("r0   |") + 11 * 5
    assert zb_h1.startswith("r0   |0123")
    assert zb_h1.count("A") == 2 == gpipe.count("a") // 2
    assert sum("one character = 1; " in line for line in lines) == 1


def test_several_are_a_list_of_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["schedule"] for one in document(capsys, "schedule=gpipe,1f1b")] == ["gpipe", "1f1b"]


def test_several_are_one_picture_and_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "schedule=gpipe,1f1b", "cost.B=3", "--svg", "both.svg", "--trace", "both.json")
    picture = ElementTree.parse(tmp_path / "both.svg")
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "gpipe: 4 ranks, 8 micro-batches, F 1, B 3, bubble 27.3 %" in texts
    assert "1f1b: 4 ranks, 8 micro-batches, F 1, B 3, bubble 27.3 %" in texts
    events = json.loads((tmp_path / "both.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_a_file_of_an_order_takes_one_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "schedule=gpipe,1f1b,nothing", *FOUR, "--csv", "both.csv"]) == 2
    told = capsys.readouterr().err
    assert "--csv = both.csv: takes one schedule" in told
    assert "schedule = nothing: there is no such option" in told


@pytest.mark.parametrize(("schedule", "microbatches"), [("pipefisher", 16), ("gpipe,zb_h1", 64)])
def test_nothing_is_wider_than_the_terminal(
    schedule: str, microbatches: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"schedule={schedule}", "parallelism.pipeline=4", f"schedule.microbatches={microbatches}"]
    for columns in (60, 132):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["schedule", *words]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


def test_a_grid_that_would_hide_actions_goes_on_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "schedule=interleaved_1f1b", "parallelism.pipeline=4", "schedule.microbatches=16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "from 37" in lines
    drawn = "".join(line.partition("|")[2] for line in lines if line.startswith("r0.0"))
    assert [drawn.count(digit) for digit in "0123456789"] == [2] * 6 + [1] * 4


def test_an_order_of_the_catalogue_that_cannot_run_is_no_drawing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its author sees the cell that is wrong: a backward twice, and so another never."""
    made = build("gpipe", ranks=2, microbatches=2)
    again = replace(made, actions=(made.actions[0], (*made.actions[1][:-1], made.actions[1][-2])))
    monkeypatch.setattr("runner.cli.schedule.schedule_of", lambda config: again)
    assert (
        main(["schedule", "schedule=gpipe", "parallelism.pipeline=2", "schedule.microbatches=2"]) == EXIT_WRONG_REQUEST
    )
    assert "schedule = gpipe: rank 1, cell 3 (1B" in capsys.readouterr().err
