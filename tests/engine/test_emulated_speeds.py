"""A rank emulates a slower device: it sleeps after what it computes, by a clock that moves a second at each look."""

from __future__ import annotations

import threading
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from layouts import make_engine
from torch import nn

from runner.engine import context
from runner.engine import engine as engine_module
from runner.engine.measure.clocks import HostClock
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.window import StepBatch


class Ticking(HostClock):
    """Each look at it is a second later, so that what begins at one look and ends at the next takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = count()

    def moment(self) -> float:
        return float(next(self._looks))


def slept(monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...]) -> list[list[float]]:
    """The seconds that each of two ranks has slept in a step of four micro-batches."""
    found: list[list[float]] = [[], []]
    own: dict[int, list[float]] = {}

    def sleep(seconds: float) -> None:
        own[threading.get_ident()].append(seconds)

    monkeypatch.setattr(context, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(engine_module, "clock_of", lambda device: Ticking())

    def rank(transport: ThreadTransport) -> None:
        own[threading.get_ident()] = found[transport.rank]
        engine = make_engine(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.functional.mse_loss, transport,
            schedule="1f1b", pipeline=2, data=1, count=4, optimizer=partial(torch.optim.SGD, lr=0.1), speeds=speeds,
        )  # fmt: skip
        batch = torch.ones(8, 4)
        first = transport.rank == 0
        engine.submit(StepBatch(batch if first else None, None if first else batch, 8))
        engine.drain()

    run_ranks(2, rank)
    return found


def test_each_forward_backward_and_update_takes_as_long_as_on_the_slower_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = slept(monkeypatch, (0.25, 1.0))
    assert found == [[3.0] * (4 + 4 + 1), []]


def test_without_speeds_nobody_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slept(monkeypatch, ()) == [[], []]
