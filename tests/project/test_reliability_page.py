"""docs/reliability.md promises nothing without a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    line
    for line in (ROOT / "docs/reliability.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| promised"))
]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_a_promise_stands_beside_a_test_that_exists(row: str) -> None:
    _, promise, tests, _ = row.split("|")
    assert promise.strip().endswith(".")
    named = _TEST.findall(tests)
    assert named
    assert _TEST.sub("", tests).strip(" ,") == ""
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
