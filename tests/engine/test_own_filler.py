"""The engine runs work of one's own in the bubbles, done by an object that it knows by its protocol alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import layouts
import pytest
import torch
from torch import nn
from torch.nn import functional

from runner.engine.measure.timeline import Timeline
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.work import Place
from runner.schedule.catalogue import registry
from runner.schedule.fills import Filling, FillKind, Shown
from runner.schedule.generators.fill_bubbles import fill_bubbles
from runner.schedule.simulation.clock import Costs
from runner.schedule.values import Action, Op, Schedule

COUNT = 2
ADD = FillKind("ADD", "add", 1.0, "+", "#111111", "additions", shown_by=Shown.FORWARD)
TOTAL = FillKind("TOTAL", "total", 50.0, "=", "#222222", "totals", follows="ADD")
SUMS = Filling("the adder", "sums", "totals", "+ adds, = totals", "adder", "sums of inputs", (ADD, TOTAL))


class Adder:
    """Adds up the inputs of each stage of an interval's first step."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], float] = {}
        self.added: dict[int, float] = {}
        self.totals: list[float] = []
        self.log: list[str] = []

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        if self._is_first:
            self.seen[place.stage, place.microbatch] = float(value.detach().sum())
        return nullcontext()

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        return nullcontext()

    @contextmanager
    def seeing(self, stage: int, microbatch: int) -> Iterator[None]:
        yield

    def begin(self, window: int) -> None:
        self._is_first = window == 0

    def do(self, action: Action, timeline: Timeline) -> None:
        self.log.append(str(action))
        if action.microbatch is not None:
            value = self.seen.pop((action.stage, action.microbatch))
            self.added[action.stage] = self.added.get(action.stage, 0.0) + value
        else:
            self.totals.append(self.added.pop(action.stage))

    def settle(self) -> None:
        self.log.append("settled")


class Watch:
    """The part of a watch that ``make_engine`` asks for."""

    def __init__(self, adder: Adder) -> None:
        self._adder = adder

    def filler(self, stages: object, ties: object) -> Adder:
        return self._adder


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def trained(order: Schedule, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Each rank's weights after steps of gradient descent."""
    models = [make_model() for _ in range(2)]

    def run(transport: ThreadTransport) -> list[torch.Tensor]:
        layout: dict[str, Any] = {"schedule": order, "pipeline": 2, "data": 1, "count": COUNT}
        descent = partial(torch.optim.SGD, lr=0.1)
        engine = layouts.make_engine(
            models[transport.rank], functional.mse_loss, transport, optimizer=descent, **layout
        )
        for batch in batches:
            engine.submit(layouts.part_of(batch, transport, 2, 1, order))
        engine.drain()
        return [weight.detach().clone() for weight in engine.stages[transport.rank].parameters()]

    return run_ranks(2, run)


def test_its_actions_run_in_their_places_and_leave_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    base = registry.build("1f1b", ranks=2, microbatches=COUNT)
    order = fill_bubbles(base, SUMS, Costs().per_stage(2, 1, filling=SUMS), "summed")
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(4, 3, generator=generator) for _ in range(2)) for _ in range(2 * order.windows)]
    plain = trained(base, batches)  # type: ignore[arg-type]  # each is a pair
    adders: list[Adder] = []

    def watch(optimizer: object) -> Watch:
        adders.append(Adder())
        return Watch(adders[-1])

    monkeypatch.setattr(layouts, "watch_of", watch)
    filled = trained(order, batches)  # type: ignore[arg-type]
    assert all(map(torch.equal, plain[0] + plain[1], filled[0] + filled[1]))
    by_rank = {adder.log[0][0]: adder for adder in adders}
    for rank, row in enumerate(order.actions):
        fills = [str(action) for action in row if action.op is Op.FILL]
        assert by_rank[str(rank)].log[: 2 * len(fills)] == 2 * fills
    first = [float(batches[step][0].sum()) for step in (0, order.windows)]
    assert by_rank["0"].totals == pytest.approx(first, rel=1e-5)
