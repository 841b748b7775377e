"""The list of slow files is of this checkout, and is written from what a run has measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import slow_tests
from slow_tests import LIST, slow_files

TESTS = Path(__file__).parents[1]


def test_each_file_is_there() -> None:
    assert [file for file in slow_files() if not (TESTS / file).is_file()] == []


def test_the_files_with_the_longest_tests_are_slow(tmp_path: Path) -> None:
    cases = [
        ("tests.a.test_quick", 0.1),
        ("tests.a.test_quick", 0.3),
        ("tests.b.test_middle", 4),
        ("tests.b.test_long", 9),
    ]
    lines = "".join(f'<testcase classname="{name}" name="test_one" time="{seconds}"/>' for name, seconds in cases)
    (tmp_path / "measured.xml").write_text(f"<testsuites><testsuite>{lines}</testsuite></testsuites>")
    (tmp_path / "slow_tests.py").write_text(Path(slow_tests.__file__).read_text())
    for limit, expected in (("0.5", ["b/test_long.py", "b/test_middle.py"]), ("4.5", ["b/test_long.py"])):
        subprocess.run([sys.executable, tmp_path / "slow_tests.py", tmp_path / "measured.xml", limit], check=True)
        assert (tmp_path / LIST.name).read_text().split() == expected
