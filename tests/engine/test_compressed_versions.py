"""A compressor under an asynchronous schedule: two stages, two replicas, against a plain loop with a delay of one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from halved_sums import KIND
from late_weights import make_batches, make_model
from layouts import make_engine, part_of
from torch import Tensor
from torch.nn import functional

from runner.config.schema import CompressionConfig
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.schedule import build

RATE, COUNT, REPLICAS = 2.0**-3, 4, 2


def by_hand(batches: Sequence[tuple[Tensor, Tensor]], *, delay: int) -> dict[str, Tensor]:
    """Older weights make each replica's gradients; what bfloat16 cuts off goes into the replica's next gradients."""
    model = make_model()
    parameters = list(model.parameters())
    left = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(REPLICAS)]
    versions = [copy.deepcopy(model.state_dict())]
    for step, (inputs, targets) in enumerate(batches):
        model.load_state_dict(versions[max(0, step - delay)])
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for replica, kept in enumerate(left):
            parts = slice(replica * COUNT, (replica + 1) * COUNT)
            model.zero_grad()
            pairs = zip(inputs[parts].tensor_split(COUNT), targets[parts].tensor_split(COUNT), strict=True)
            for given, wanted in pairs:
                functional.mse_loss(model(given), wanted).backward()  # type: ignore[no-untyped-call]
            for parameter, total, residual in zip(parameters, totals, kept, strict=True):
                assert parameter.grad is not None
                whole = residual + parameter.grad
                total += whole.bfloat16().float()
                residual.copy_(whole - whole.bfloat16().float())
        model.load_state_dict(versions[-1])
        with torch.no_grad():
            for parameter, total in zip(parameters, totals, strict=True):
                parameter.sub_(RATE * (total / (REPLICAS * COUNT)))
        versions.append(copy.deepcopy(model.state_dict()))
    return model.state_dict()


def by_engine(batches: Sequence[tuple[Tensor, Tensor]], drained_after: int) -> list[dict[str, Tensor]]:
    """The weights of each rank's stage."""
    section = CompressionConfig(name="halves", target="halved_sums:KIND")
    schedule = build("pipedream_2bw", ranks=2, microbatches=COUNT)
    models = [make_model() for _ in range(2 * REPLICAS)]

    def run(transport: ThreadTransport) -> dict[str, Tensor]:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport, schedule=schedule, pipeline=2, data=REPLICAS,
            count=COUNT, optimizer=partial(torch.optim.SGD, lr=RATE),
        )  # fmt: skip
        engine.reduce_by(lambda gradients: KIND.reducer(section, gradients))
        for step, batch in enumerate(batches):
            engine.submit(part_of(batch, transport, 2, REPLICAS, schedule))
            if step == drained_after:
                engine.drain()
        engine.drain()
        return {name: value for stage in engine.stages.values() for name, value in stage.global_state().items()}

    return run_ranks(2 * REPLICAS, run)


def test_residuals_follow_the_gradients_of_delayed_weights() -> None:
    batches = make_batches(REPLICAS * COUNT, steps=6)
    expected = by_hand(batches, delay=1)
    for weights in by_engine(batches, drained_after=2):
        assert len(weights) == 8
        assert [name for name, value in weights.items() if not torch.equal(value, expected[name])] == []
    undelayed = by_hand(batches, delay=0)
    assert any(not torch.equal(undelayed[name], value) for name, value in expected.items())
