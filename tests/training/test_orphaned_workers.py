"""A loader worker ends with its rank, whatever it is doing when the rank is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest

from runner.training.data.loading import _begin_worker

_FORK = multiprocessing.get_context("fork")


def _just_begun(rank: int, tell: int) -> None:
    """The rank is killed before the worker has come to its first line."""
    os.write(tell, b"ready ")
    while os.getppid() == rank:
        time.sleep(0.01)
    _begin_worker(0, 0)
    os.write(tell, b"alive")


def _in_a_sample(rank: int, tell: int) -> None:
    """The rank is killed while the worker makes a sample that takes long."""
    _begin_worker(0, 0)
    os.write(tell, b"ready ")
    while os.getppid() == rank:
        time.sleep(0.01)
    time.sleep(0.2)
    os.write(tell, b"alive")


def _be_rank(work: Callable[[int, int], None], tell: int) -> None:
    _FORK.Process(target=work, args=(os.getpid(), tell)).start()
    time.sleep(60)


@pytest.mark.parametrize("work", [_just_begun, _in_a_sample])
def test_a_worker_ends_with_a_rank_that_is_killed(work: Callable[[int, int], None]) -> None:
    told, tell = os.pipe()
    rank = _FORK.Process(target=_be_rank, args=(work, tell))
    rank.start()
    os.close(tell)
    assert rank.pid is not None
    with os.fdopen(told, "rb") as said:
        assert said.read(6) == b"ready "
        os.kill(rank.pid, signal.SIGKILL)
        rank.join()
        assert said.read() == b"", "it ends with all that it holds open"
