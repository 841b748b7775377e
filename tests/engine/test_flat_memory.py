"""Nothing is left behind by the steps of a stream: after 45 of them, as many bytes of tensors live as after 5."""

from __future__ import annotations

import gc
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from torch import Tensor, nn
from torch.nn import functional

from runner.config.schema import OptimizerConfig, RunConfig, ScheduleConfig
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.optim.states.elastic import ElasticAverage
from runner.plan.averaging import Averaging
from runner.plan.prediction import prediction_of
from runner.schedule import build

RANKS, WIDTH = 3, 6
COUNTED_AFTER = (5, 25, 45)
MOMENTUM = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
COUNTS = {"pipemare": 1, "wpipe": 4, "avgpipe": 4}


def live_bytes() -> int:
    """The bytes of all tensors of this process, each storage once."""
    gc.collect()
    found = [value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter)]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in found}
    return sum(storages.values())


def make_model(layers: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def options_of(name: str, schedule: Any) -> dict[str, Any]:
    """What the schedule needs besides itself: predictions, or an optimizer of several copies of the weights."""
    if name == "avgpipe":
        averaging = Averaging(pipes=2, elasticity=0.5, form="easgd")
        return {"optimizer": lambda parameters: ElasticAverage(parameters, MOMENTUM, averaging)}
    config = RunConfig(
        schedule=ScheduleConfig(name=name, microbatches=COUNTS[name]),
        optimizer=OptimizerConfig(name="sgd", lr=0.01, momentum=0.9),
    )
    config.parallelism.pipeline = RANKS
    if name == "pipemare":
        vars(config.schedule).update(discrepancy_correction=0.135)
    return {"optimizer": MOMENTUM, "prediction": prediction_of(config, schedule)}


@pytest.mark.costly
@pytest.mark.parametrize("name", COUNTS)
def test_tensor_bytes_are_flat(name: str) -> None:
    count = COUNTS[name]
    schedule = build(name, ranks=RANKS, microbatches=count)
    options = options_of(name, schedule)
    models = [make_model(schedule.stages) for _ in range(RANKS)]
    inputs, targets = torch.randn(2, 4 * count, WIDTH, generator=torch.Generator().manual_seed(7))
    meeting, counted = Barrier(RANKS), list[int]()

    def run(transport: ThreadTransport) -> None:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport,
            schedule=schedule, pipeline=RANKS, data=1, count=count, **options,
        )  # fmt: skip
        for step in range(1, COUNTED_AFTER[-1] + 1):
            engine.submit(part_of((inputs, targets), transport, RANKS, 1, schedule))
            if step in COUNTED_AFTER:
                engine.drain()
                meeting.wait()
                if transport.rank == 0:
                    counted.append(live_bytes())
                meeting.wait()

    run_ranks(RANKS, run)
    assert len(counted) == len(COUNTED_AFTER)
    assert len(set(counted)) == 1, counted
