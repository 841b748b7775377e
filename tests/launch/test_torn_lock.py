"""A command that dies while it takes the lock leaves none that the next one would have to wait for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runner.launch.run import lock
from runner.launch.run.lock import LOCK_FILE, alone_in


class Killed(BaseException):
    """Stands for a signal in the middle of a call."""


@pytest.mark.parametrize("name", ["open", "fsync", "link"])
def test_a_command_that_dies_in_the_middle_leaves_no_lock_without_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, monkeyed = getattr(os, name), []

    def dies(*given: Any, **named: Any) -> Any:
        monkeyed.append(given)
        if name == "open":
            real(*given, **named)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, name, dies)
        with pytest.raises(Killed), alone_in(tmp_path, "a first"):
            pass
    assert monkeyed
    assert not (tmp_path / LOCK_FILE).exists()
    monkeypatch.setattr(lock, "_is_silent", lambda *_: pytest.fail("the next command waits for an owner"))
    with alone_in(tmp_path, "a second"):
        assert (tmp_path / LOCK_FILE).exists()


def test_a_file_system_without_hard_links_has_a_lock_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    with alone_in(tmp_path, "a first"):
        with pytest.raises(lock.InUseError), alone_in(tmp_path, "a second"):
            pass
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    assert not list(tmp_path.iterdir())
