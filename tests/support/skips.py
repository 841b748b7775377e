"""Tests that were skipped: on a machine for checks, a package that can be installed is no reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

NO_PACKAGE_HELPS = (
    "no CUDA device",
    "this is no git checkout",
    "no file system can be mounted here",
    "needs root, for the nodes' namespaces",
)
"""Reasons that a machine for checks may have."""


def reasons(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> Counter[str]:
    """How many tests, or files, were skipped for each reason."""
    return Counter(_reason(report) for report in reports if report.skipped)


def unexpected(found: Mapping[str, int], environment: Mapping[str, str]) -> list[str]:
    """The reasons that are a failure: where ``CI`` is ``true``, all but those that no package mends."""
    return [reason for reason in found if reason not in NO_PACKAGE_HELPS] if environment.get("CI") == "true" else []


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return told.removeprefix("Skipped: ")
