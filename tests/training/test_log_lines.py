"""Log lines of a rank: what is raised while one is written ends the run, unless it is the terminal that is gone."""

from __future__ import annotations

import logging

import pytest

from runner.training.run import _Lines


class _Raises:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, text: str) -> None:
        raise self._error

    def flush(self) -> None:
        pass


def test_a_worker_that_dies_during_a_line_is_not_forgotten() -> None:
    record = logging.LogRecord("runner", logging.INFO, __file__, 1, "step 3", None, None)
    with pytest.raises(RuntimeError, match="worker"):
        _Lines(_Raises(RuntimeError("DataLoader worker exited unexpectedly"))).emit(record)
    _Lines(_Raises(BrokenPipeError())).emit(record)
