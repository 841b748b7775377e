"""Ranks that cannot meet say so within the time they are given, and who is missing."""

from __future__ import annotations

import socket

import pytest

from runner.errors import RunFailedError
from runner.launch.processes.meeting import meet


def _as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, port: int, address: str = "127.0.0.1") -> None:
    variables = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def _taken() -> socket.socket:
    taken = socket.socket()
    taken.bind(("", 0))
    taken.listen(1)
    return taken


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with _taken() as free:
        port = free.getsockname()[1]
    _as_rank(monkeypatch, 0, port)
    with pytest.raises(RunFailedError, match="rank 0 on .* waited 1 s for 2 of 3 ranks that did not come: 1, 2"):
        meet(1.0)


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with _taken() as taken:
        _as_rank(monkeypatch, 0, taken.getsockname()[1])
        with pytest.raises(RunFailedError, match="cannot open port .* set MASTER_PORT to a free one"):
            meet(5.0)


def test_rank_0_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with _taken() as free:
        port = free.getsockname()[1]
    _as_rank(monkeypatch, 2, port)
    with pytest.raises(RunFailedError, match=f"rank 2 on .* did not reach rank 0 at 127.0.0.1:{port} in 1 s"):
        meet(1.0)


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_rank(monkeypatch, 1, 1234, "nowhere.invalid")
    with pytest.raises(RunFailedError, match="rank 1 on .* cannot resolve nowhere.invalid, rank 0's node"):
        meet(60.0)
