"""A command that will be silent for seconds says first what it does."""

from __future__ import annotations

import pytest

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.launch.run import prepare


class AskedTooSoon(Exception):
    pass


def test_a_plan_is_announced_before_anything_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(config: RunConfig) -> None:
        raise AskedTooSoon

    monkeypatch.setattr(prepare, "check_run_directory", ask)
    with caplog.at_level("INFO", logger="runner"), pytest.raises(AskedTooSoon):
        prepare.prepare(resolve(["model=mlp"]))
    assert caplog.messages == [prepare.PLANNING]
