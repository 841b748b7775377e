"""A report of a stranger's records runs nothing of theirs, and shows their text as it is."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from runner.cli.main import main
from runner.record import RunRecord
from runner.report import read_report
from runner.report.tables import TextTable, runs_table
from runner.schedule.render.svg import Panel, panels_svg

TRACE = "trace"
THEIRS = """
from pathlib import Path

Path("trace").write_text("imported")

def tables(runs):
    table = {"name": "own", "title": "own", "header": ["a"], "rows": [["1"]], "values": [[1]], "notes": []}
    return {"tables": [table]}
"""


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a sweep's directory with a module of theirs, which the records name."""
    monkeypatch.chdir(tmp_path)
    Path("theirs_of_report.py").write_text(THEIRS)
    Path("0").mkdir()
    RunRecord(status="ok", config={"sweep_report": "theirs_of_report:tables"}).save(Path("0"))
    return tmp_path


def test_a_report_imports_nothing_that_a_record_names(downloaded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "."]) == 0
    assert not Path(TRACE).exists()
    told = capsys.readouterr().err
    assert "sweep_report = theirs_of_report:tables: a record names it, and it is not shipped" in told
    assert "--allow theirs_of_report:tables" in told


def test_a_function_that_the_user_allows_is_called(downloaded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", ".", "--allow", "theirs_of_report:tables"]) == 0
    assert Path(TRACE).exists()
    assert Path("report/own.csv").read_text() == "a\n1\n"


@pytest.mark.parametrize("target", ["os:system", "subprocess:run", "runner.files:write_atomically", "no name", 3])
def test_what_only_a_record_names_is_never_called(
    target: object, downloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunRecord(status="ok", config={"sweep_report": target}).save(Path("0"))
    assert main(["report", "."]) == 0
    advised = "--allow" in capsys.readouterr().err
    assert advised == (target == "runner.files:write_atomically")  # of the standard library nothing is advised


HOSTILE = "\x1b]0;owned\x07<script>alert(1)</script> | [x](http://evil)\n# heading\u202e"


def _hostile(directory: Path) -> TextTable:
    (directory / "0").mkdir()
    RunRecord(status="failed", reason=HOSTILE, extras={"overrides": [HOSTILE]}).save(directory / "0")
    return runs_table(read_report(directory))


def test_a_terminal_shows_control_characters_and_does_not_obey_them(tmp_path: Path) -> None:
    shown = io.StringIO()
    Console(file=shown, width=200).print(_hostile(tmp_path))
    assert not {"\x1b", "\x07", "\u202e"} & set(shown.getvalue())
    assert "\\x1b]0;owned\\x07<script>" in shown.getvalue()


def test_markdown_shows_html_links_and_lines_as_text(tmp_path: Path) -> None:
    text = _hostile(tmp_path).markdown()
    assert "<script>" not in text
    assert "[x](" not in text
    assert "\n# heading" not in text
    rows = [line for line in text.splitlines() if line.startswith("| 0 |")]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == text.splitlines()[2].count("|")


def test_a_picture_is_xml_whatever_its_title() -> None:
    picture = panels_svg([Panel(HOSTILE, [])])
    xml.etree.ElementTree.fromstring(picture)
    assert "<script>" not in picture


def test_errors_show_control_characters_and_do_not_obey_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"status": "\x1b[2J"}) + "\x1b[2J")
    assert main(["report", str(tmp_path)]) == 2
    assert "\x1b" not in capsys.readouterr().err
