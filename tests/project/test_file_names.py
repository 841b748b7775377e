"""pytest imports test modules and helpers by their names alone: two files of one name end a whole run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]


def test_no_two_modules_of_the_tests_have_one_name() -> None:
    names = Counter(path.name for path in _TESTS.rglob("*.py") if path.name not in {"__main__.py", "conftest.py"})

    assert [name for name, count in names.items() if count > 1] == []
