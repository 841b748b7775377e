"""Reducers of gradients on two replicas in threads: a toy compressor against ten lines of plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from halved_sums import KIND, HalvedSums, by_function
from layouts import make_engine, part_of
from narrow import present
from torch import Tensor, nn

from runner.config.schema import CompressionConfig
from runner.engine.engine import Engine
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.gradients import StageGradients
from runner.engine.update.own_reducer import OwnReducer
from runner.engine.update.reducer import LocalGradients, PlainSum
from runner.optim.catalogue.compression import Wire
from runner.optim.catalogue.registry import compression_of
from runner.strategy.reducers import load_reducer_states, own_reducer_states

RATE = 2.0**-3
STEPS = 5
Make = Callable[[StageGradients], Any]


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def half_square(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).pow(2).mean(dim=1).sum() / 2, float(len(output))


def make_batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(steps)]


def by_hand(batches: Sequence[tuple[Tensor, Tensor]], *, keep: bool = True) -> dict[str, Tensor]:
    """Gradient descent over two replicas that add up bfloat16, one micro-batch each."""
    model = make_model()
    left = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(2)]
    for inputs, targets in batches:
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for replica in range(2):
            half = slice(2 * replica, 2 * replica + 2)
            loss, _ = half_square(model(inputs[half]), targets[half])
            for total, gradient, kept in zip(
                totals, torch.autograd.grad(loss, list(model.parameters())), left[replica], strict=True
            ):
                sent = (kept + gradient).bfloat16()
                kept.copy_(kept + gradient - sent.float() if keep else torch.zeros_like(kept))
                total += sent.float()
        with torch.no_grad():
            for parameter, total in zip(model.parameters(), totals, strict=True):
                parameter.sub_(RATE * (total / 4))
    return model.state_dict()


def make_rank(model: nn.Module, transport: ThreadTransport, make: Make | None, data: int = 2) -> Engine:
    def descent(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters), lr=RATE)

    layout: dict[str, Any] = {"schedule": "1f1b", "pipeline": 1, "data": data, "count": 1}
    engine = make_engine(model, half_square, transport, optimizer=descent, skip_nonfinite=True, **layout)
    if make is not None:
        engine.reduce_by(make)
    return engine


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for stage in engine.stages.values() for name, tensor in stage.global_state().items()}


def train(make: Make | None, batches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[dict[str, Tensor], float]]:
    """The weights, and the bytes of gradients sent, of both replicas."""
    models = [make_model() for _ in range(2)]  # here, because threads share the random generator

    def run(transport: ThreadTransport) -> tuple[dict[str, Tensor], float]:
        engine = make_rank(models[transport.rank], transport, make)
        for batch in batches:
            engine.submit(part_of(batch, transport, 1, 2))
        engine.drain()
        return weights_of(engine), engine.gradients[0].sent.num_bytes

    return run_ranks(2, run)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def of_kind(**kwargs: object) -> Make:
    section = CompressionConfig(name="halves", target="halved_sums:KIND", kwargs=kwargs)
    kind = compression_of(section)
    assert kind.name == "halves"
    return lambda gradients: kind.reducer(section, gradients)


def of_function() -> Make:
    section = CompressionConfig(name="mine", target="halved_sums:by_function")
    kind = compression_of(section)
    assert (kind.name, kind.bytes_sent) == ("mine", None)
    return lambda gradients: kind.reducer(section, gradients)


@pytest.mark.parametrize(
    ("make", "keep"),
    [(of_kind(), True), (of_kind(keep=False), False), (of_function(), True)],
    ids=["kind", "kind without leftover", "function"],
)
def test_a_compressor_of_the_users_is_ten_lines_of_torch(make: Make, keep: bool) -> None:
    batches = make_batches()
    expected = by_hand(batches, keep=keep)
    for weights, sent in train(make, batches):
        assert_same(weights, expected)
        shapes = [tuple(tensor.shape) for tensor in expected.values()]
        assert sent == STEPS * KIND.bytes_in_a_step(Wire(CompressionConfig(), shapes, 4, 2))
    assert not torch.equal(expected["0.weight"], by_hand(batches, keep=not keep)["0.weight"])


def test_a_plain_sum_counts_a_rings_bytes() -> None:
    elements = sum(parameter.numel() for parameter in make_model().parameters())
    (weights, sent), (others, _) = train(None, make_batches())
    assert sent == STEPS * elements * 4  # 2 (R - 1) / R of the bytes
    assert_same(weights, others)


def test_local_gradients_stay_and_are_judged_together() -> None:
    """A replica that has a NaN makes the step not finite on both; nothing else is exchanged."""

    def run(transport: ThreadTransport) -> tuple[list[float], list[float]]:
        parameter = nn.Parameter(torch.zeros(3))
        gradients = StageGradients([("w", parameter)])
        gradients.reducer = LocalGradients(lambda: True)
        gradients.flats[0].fill_(float(transport.rank + 1))
        for handle in gradients.reducer.start(gradients, transport, (0, 1)):
            handle.wait()
        kept = gradients.flats[0].tolist()
        gradients.flats[0][2] = math.nan if transport.rank else 1.0
        for handle in gradients.reducer.start(gradients, transport, (0, 1)):
            handle.wait()
        assert not gradients.are_finite()
        return kept, gradients.flats[0].tolist()[1:2]

    assert run_ranks(2, run) == [([1.0] * 3, [1.0]), ([2.0] * 3, [2.0])]


def test_local_gradients_are_summed_where_they_may() -> None:
    def run(transport: ThreadTransport) -> list[float]:
        gradients = StageGradients([("w", nn.Parameter(torch.zeros(3)))])
        gradients.reducer = LocalGradients(lambda: False)
        gradients.flats[0].fill_(float(transport.rank + 1))
        for handle in gradients.reducer.start(gradients, transport, (0, 1)):
            handle.wait()
        return gradients.flats[0].tolist()

    assert run_ranks(2, run) == [[3.0] * 3] * 2


def test_another_number_of_replicas_takes_the_mean_of_what_is_kept() -> None:
    model = make_model()
    saved = [
        {"replica": replica, "states": {name: {"left": torch.full_like(p, replica + 1.0)} for name, p in parts.items()}}
        for replica, parts in enumerate([dict(model.named_parameters())] * 2)
    ]

    def run(transport: ThreadTransport) -> dict[str, Tensor]:
        engine = make_rank(model, transport, of_kind(), data=1)
        load_reducer_states(engine, 0, 1, saved)
        return {name: entry["left"].clone() for name, entry in engine.gradients[0].reducer.state_dict().items()}

    assert_same(run_ranks(1, run)[0], {name: torch.full_like(p, 1.5) for name, p in model.named_parameters()})


def test_a_stage_has_a_reducer_of_its_own_whose_saved_state_is_a_copy() -> None:
    models = [make_model() for _ in range(4)]

    def run(transport: ThreadTransport) -> tuple[list[str], bool]:
        layout: dict[str, Any] = {"schedule": "1f1b", "pipeline": 2, "data": 2, "count": 1}
        engine = make_engine(
            models[transport.rank], half_square, transport, optimizer=lambda p: torch.optim.SGD(p, lr=RATE), **layout
        )
        engine.reduce_by(of_kind())
        first, *others = make_batches()
        engine.submit(part_of(first, transport, 2, 2))
        engine.drain()
        kept = present(own_reducer_states(engine, transport.rank % 2))
        before = {name: entry["left"].clone() for name, entry in kept["states"].items()}
        for batch in others:
            engine.submit(part_of(batch, transport, 2, 2))
        engine.drain()
        assert_same({name: entry["left"] for name, entry in kept["states"].items()}, before)
        (stage,) = engine.stages
        reducer = engine.gradients[stage].reducer
        return sorted(kept["states"]), isinstance(reducer, OwnReducer) and isinstance(reducer.inner, HalvedSums)

    found = run_ranks(4, run)
    assert [names for names, _ in found] == [["0.bias", "0.weight"]] * 2 + [["2.bias", "2.weight"]] * 2
    assert all(made for _, made in found)


def test_plain_sums_have_nothing_to_save() -> None:
    assert PlainSum().state_dict() == {}
    assert by_function(StageGradients([]), keep=False).state_dict() == {}
