"""Tables and figures of runs and sweeps, made from their records alone."""

from __future__ import annotations

from runner.report.read import Report, Run, read_report
from runner.report.write import report

__all__ = ["Report", "Run", "read_report", "report"]
