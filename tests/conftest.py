"""What holds for every test."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A part of a whole matrix is slow, too: ``-m "not slow"`` replaces the default, which leaves it out."""
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker("slow")
