"""A timeline reads its moments when a step has ended, because a device passes them later than the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__

from runner.engine.measure import clocks
from runner.engine.measure.timeline import Event, Timeline


class Late:
    """A clock of a device: moments are numbers of events; each event is passed half a second after the one before."""

    behind = 0.0

    def __init__(self) -> None:
        self.recorded = 0
        self.reads: list[int] = []

    def moment(self) -> int:
        self.recorded += 1
        return self.recorded

    def seconds(self, moments: Sequence[int]) -> list[float]:
        self.reads.append(len(moments))
        return [100 + moment / 2 for moment in moments]


def test_a_step_of_a_device_is_read_at_its_end() -> None:
    clock = Late()
    line = Timeline(clock)
    line.begin(7)  # event 1
    line.compute("F", 0, 1, line.moment())  # 2, 3
    start = line.moment()  # 4
    line.add("waiting", start)  # 5
    line.compute("B", 0, 1, line.moment())  # 6, 7
    start, agreed = line.moment(), line.moment()  # 8, 9
    line.add("waited_at_step", start, agreed)
    line.add("optimizer", agreed)  # 10
    assert line.current.compute == 0.0  # nobody has waited for the device
    assert set(clock.reads) == {0}
    line.finish()  # 11
    (step,) = line.steps
    assert (step.start, step.end, step.first_compute, step.last_compute) == (100.5, 105.5, 101.0, 103.5)
    assert (step.compute, step.waiting, step.waited_at_step, step.optimizer) == (1.0, 0.5, 0.5, 0.5)
    assert line.events[-1] == (7, [Event("F", 0, 1, 101.0, 101.5), Event("B", 0, 1, 103.0, 103.5)])


def test_what_follows_a_step_belongs_to_it() -> None:
    """A drain after the last batch computes between two steps."""
    line = Timeline(Late())
    line.begin(0)
    line.finish()
    line.compute("B", 0, 0, line.moment())
    assert line.steps[0].compute == 0.0
    line.begin(1)
    assert line.steps[0].compute == 0.5
    line.finish()
    assert line.events[-1] == (1, [])


def test_the_host_knows_at_once() -> None:
    line = Timeline()
    line.begin(0)
    line.compute("F", 0, 0, line.moment())
    line.finish()
    (step,) = line.steps
    assert step.start <= step.first_compute <= step.last_compute <= step.end
    assert step.compute == pytest.approx(step.last_compute - step.first_compute)


def test_events_of_a_stream_are_counted_back_from_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.Event`` as its documentation has it: milliseconds from this event to a later one."""
    asked: list[str] = []

    class Fake:
        made = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            Fake.made += 1
            self.milliseconds = 1000.0 * Fake.made

        def record(self) -> None:
            asked.append("record")

        def synchronize(self) -> None:
            asked.append("synchronize")

        def elapsed_time(self, end: Fake) -> float:
            assert asked[-1] == "synchronize"
            return end.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Fake)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: 50.0))
    clock: Any = clocks.clock_of(torch.device("cuda", 0))
    first, second = clock.moment(), clock.moment()
    assert clock.seconds([first, second]) == [48.0, 49.0]
    assert clock.seconds([]) == []
    assert asked == ["record"] * 3 + ["synchronize"]
    assert isinstance(clocks.clock_of(torch.device("cpu")), clocks.HostClock)


def test_ranks_of_other_machines_tell_the_time_of_rank_0() -> None:
    """The clocks of two machines began when these were started."""
    store, found = HashStore(), {}

    def rank(number: int, ahead: float) -> None:
        found[number] = clocks.seconds_behind(store, number, 3, lambda: time.perf_counter() + ahead)

    for _ in range(2):  # in the same store
        threads = [threading.Thread(target=rank, args=each) for each in ((0, 0.0), (1, 5000.0), (2, 0.0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found[1] == pytest.approx(-5000, abs=1)
        assert found[0] == found[2] == 0.0  # the same clock is not moved by what messages take
    assert clocks.seconds_behind(None, 0, 1) == 0.0
    clock = clocks.HostClock()
    clock.behind = -5000.0
    assert clock.seconds([5001.5]) == [1.5]
