"""A guest costs few files: what no other part of the house names can be taken out, or replaced, by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import runner

_PACKAGE = Path(runner.__file__).parent
_ROOT = _PACKAGE.parent
_GUESTS = {"K-FAC": (re.compile(r"curvature|k-?fac|\bCURV_|\bINV_[AB]|pipefisher", re.IGNORECASE), 12)}
"""What names a guest, and how many files may, its option files included."""


def _files() -> list[Path]:
    links = [_PACKAGE / "conf", _PACKAGE / "recipes"]  # of the folders beside the package
    code = [file for file in _PACKAGE.rglob("*.py") if not any(file.is_relative_to(link) for link in links)]
    return [*code, *(_ROOT / "conf").rglob("*.yaml")]


@pytest.mark.parametrize(("names", "most"), _GUESTS.values(), ids=_GUESTS)
def test_a_guest_is_named_in_its_own_files(names: re.Pattern[str], most: int) -> None:
    found = [str(file.relative_to(_ROOT)) for file in _files() if names.search(file.read_text(encoding="utf-8"))]
    assert 0 < len(found) <= most, sorted(found)
