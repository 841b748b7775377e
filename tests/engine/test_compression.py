"""Compressed sums in the engine, against plain loops: replicas, pipelines, clipping, overflows, checkpoints, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import plain_compressors
import pytest
import torch
from layouts import make_engine, part_of
from torch import Tensor, nn

from runner.config.schema import CompressionConfig
from runner.engine.engine import Engine
from runner.engine.loss_scale import LossScaling
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.seeds import mix_seed
from runner.optim.catalogue.compression import Wire
from runner.optim.catalogue.registry import compression_of
from runner.strategy.reducers import load_reducer_states, own_reducer_states

STEPS, COUNT = 8, 2
SIZES = (5, 8, 7, 3)
KEYS: dict[str, dict[str, Any]] = {
    "fp16": {}, "bf16": {}, "topk": {"density": 0.2}, "randomk": {"density": 0.2}, "qsgd": {"levels": 7},
    "signsgd": {}, "powersgd": {"rank": 2}, "gradzip": {"rank": 2},
}  # fmt: skip
PLAIN: dict[str, plain_compressors.Plain] = {
    "fp16": plain_compressors.halves(torch.float16),
    "bf16": plain_compressors.halves(torch.bfloat16),
    "topk": plain_compressors.largest(0.2),
    "signsgd": plain_compressors.signs(vote=False),
    "powersgd": plain_compressors.power(2),
    "gradzip": plain_compressors.alternating(2),
    "randomk": plain_compressors.drawn(
        0.2,
        [size for a, b in zip(SIZES, SIZES[1:], strict=False) for size in (a * b, b)],
        lambda step: mix_seed(0, step, "compression", "0.weight"),
    ),
}
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
Batches = Sequence[tuple[Tensor, Tensor]]


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    pairs = zip(SIZES, SIZES[1:], strict=False)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())))


def half_square(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).pow(2).mean(dim=1).sum() / 2, float(len(output))


def make_batches(steps: int = STEPS, samples: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)

    def draw(size: int) -> Tensor:
        return torch.randn(samples, size, generator=generator)

    return [(draw(SIZES[0]), draw(SIZES[-1])) for _ in range(steps)]


def section_of(name: str, **keys: Any) -> CompressionConfig:
    return CompressionConfig(name=name, **{**KEYS[name], **keys})


def rights(rank: int = 2) -> dict[str, Tensor]:
    """The right factors with which a power iteration begins, for the weights that have some."""
    generator = torch.Generator().manual_seed(9)
    names = {name: p.shape for name, p in make_model().named_parameters() if p.dim() > 1}
    return {name: torch.randn(shape[1], rank, generator=generator) for name, shape in names.items()}


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for stage in engine.stages.values() for name, tensor in stage.global_state().items()}


class Ranks:
    """Trains in threads; ``states`` is what each rank's reducers are given, and what they keep in the end."""

    def __init__(self, section: CompressionConfig, *, data: int, pipeline: int = 1, **options: Any) -> None:
        self.section, self.data, self.pipeline = section, data, pipeline
        self.options = {"optimizer": OPTIMIZERS["sgd"], **options}
        self.states: list[dict[str, Any] | None] = []
        self.sent: list[float] = []

    def train(
        self,
        batches: Batches,
        *,
        start: int = 0,
        weights: dict[str, Tensor] | None = None,
        prepare: Callable[[Engine], None] | None = None,
    ) -> dict[str, Tensor]:
        """The weights afterwards, which are the same on all replicas."""
        count = self.data * self.pipeline
        models = [make_model() for _ in range(count)]  # here, because threads share the random generator
        for model in models if weights is not None else ():
            model.load_state_dict(weights or {})
        kind, saved = compression_of(self.section), [state for state in self.states if state is not None]

        def run(transport: ThreadTransport) -> tuple[dict[str, Tensor], dict[str, Any] | None, float]:
            layout: dict[str, Any] = {"schedule": "1f1b", "pipeline": self.pipeline, "data": self.data, "count": COUNT}
            engine = make_engine(models[transport.rank], half_square, transport, **layout, **self.options)
            engine.reduce_by(partial(kind.reducer, self.section))
            load_reducer_states(engine, transport.rank % self.data, self.data, saved)
            engine.start_at(start)
            if prepare is not None:
                prepare(engine)
            for batch in batches:
                engine.submit(part_of(batch, transport, self.pipeline, self.data))
            engine.drain()
            sent = sum(each.sent.num_bytes for each in engine.all_gradients)
            return weights_of(engine), own_reducer_states(engine, transport.rank % self.data), sent

        found = run_ranks(count, run)
        self.states, self.sent = [state for _, state, _ in found], [sent for _, _, sent in found]
        whole: dict[str, Tensor] = {}
        for own, _, _ in found:
            for name, value in own.items():
                assert torch.equal(whole.setdefault(name, value), value), f"{name} differs between replicas"
        return whole

    def residual(self, name: str) -> Tensor:
        """The sum over replicas of what is left over of a weight."""
        rows = [state["states"][name]["residual"] for state in self.states if state and name in state["states"]]
        return torch.stack(rows).sum(dim=0)


def by_hand(name: str, batches: Batches, *, replicas: int, optimizer: str = "sgd", feedback: bool = True) -> Any:
    kept = {at: {"at": at, "right": rights().get(each)} for at, (each, _) in enumerate(make_model().named_parameters())}
    return plain_compressors.train(
        make_model(), lambda output, target: half_square(output, target)[0], batches, PLAIN[name],
        replicas=replicas, optimizer=OPTIMIZERS[optimizer], feedback=feedback, kept=kept, microbatches=COUNT,
    )  # fmt: skip


def begun_with_rights(ranks: Ranks) -> None:
    """Let a power iteration begin with known factors."""
    zeros = {name: torch.zeros_like(p) for name, p in make_model().named_parameters()}
    entries = {
        name: {"residual": zeros[name], **({"right": rights()[name]} if name in rights() else {})} for name in zeros
    }
    ranks.states = [{"replica": replica, "states": entries} for replica in range(ranks.data)]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-5) -> None:
    assert sorted(found) == sorted(expected)
    assert {
        n: float((found[n] - e).abs().max()) for n, e in expected.items() if (found[n] - e).abs().max() > atol
    } == {}


@pytest.mark.parametrize("name", PLAIN)
def test_steps_are_those_of_plain_torch(name: str) -> None:
    """What is compressed is the sum over two micro-batches, and what is left over goes on."""
    batches, (replicas, optimizer) = make_batches(), (3, "adam") if name in ("bf16", "topk", "gradzip") else (2, "sgd")
    ranks = Ranks(section_of(name, error_feedback=True), data=replicas, optimizer=OPTIMIZERS[optimizer])
    begun_with_rights(ranks)
    found = ranks.train(batches)
    expected = by_hand(name, batches, replicas=replicas, optimizer=optimizer)
    assert_close(found, expected, 5e-3 if name == "fp16" else 1e-4)
    without = by_hand(name, batches, replicas=replicas, optimizer=optimizer, feedback=False)
    if name not in ("fp16", "bf16"):  # where hardly anything is left over
        assert any(float((without[each] - expected[each]).abs().max()) > 1e-3 for each in expected)


def test_stages_and_clipping_change_nothing() -> None:
    """A tensor is compressed as where all stages are on one rank; the norm is that of what was summed."""
    name = "powersgd"
    batches = make_batches(6)
    whole = Ranks(section_of(name), data=2, clip_norm=0.05)
    staged = Ranks(section_of(name), data=2, pipeline=2, clip_norm=0.05)
    for each in (whole, staged):
        begun_with_rights(each)
    found = staged.train(batches)
    assert_close(found, whole.train(batches), 1e-6)
    assert any(not torch.equal(value, by_hand(name, batches, replicas=2)[key]) for key, value in found.items())


def spoil(at: int, position: int) -> Callable[[Engine], None]:
    """Make a gradient of the second replica infinite in one step, on the ranks of one stage alone."""

    def prepare(engine: Engine) -> None:
        if engine.view.position != position or engine.transport.rank % 2 == 0:
            return
        parameter = next(iter(engine.stages[position].parameters()))
        parameter.register_hook(lambda gradient: gradient * (math.inf if engine.step == at else 1.0))  # type: ignore[no-untyped-call]

    return prepare


@pytest.mark.parametrize(("name", "position"), [("topk", 0), ("powersgd", 1)])
def test_an_overflow_leaves_no_trace(name: str, position: int) -> None:
    """Also on the other stage, whose own gradients were finite; and the next steps have another loss scale."""
    batches = make_batches(6)
    ranks = Ranks(section_of(name), data=2, pipeline=2, scaling=LossScaling(initial_scale=2.0**8, samples=12))
    begun_with_rights(ranks)
    spoilt = ranks.train([*batches[:3], batches[0], *batches[3:]], prepare=spoil(3, position))
    plain = Ranks(section_of(name), data=2, pipeline=2)
    begun_with_rights(plain)
    assert_close(spoilt, plain.train(batches), 1e-5)
    for name_of in ("0.weight", "4.weight"):
        assert torch.allclose(ranks.residual(name_of), plain.residual(name_of), atol=1e-5)


def test_steps_before_the_first_compressed_one_are_plain_sums() -> None:
    batches = make_batches(6)
    plain = Ranks(CompressionConfig(), data=2)
    expected = plain.train(batches[:3])
    late = Ranks(section_of("topk", start_step=3), data=2)
    for name, value in late.train(batches[:3]).items():
        assert torch.equal(value, expected[name])
    assert late.sent == plain.sent
    goes_on = late.train(batches[3:], start=3, weights=expected)
    own = Ranks(section_of("topk"), data=2).train(batches[3:], weights=expected)
    assert_close(goes_on, own, 0.0)


class Line(nn.Module):
    """A layer whose gradients do not depend on its weights, so that they add up over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6))

    def forward(self, value: Tensor) -> Tensor:
        return value @ self.weight.T


def line_sum(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output * target).sum(), float(len(output))


def part_of_line(
    section: CompressionConfig, batches: Batches, start: int, weight: Tensor, saved: Sequence[Any]
) -> tuple[Tensor, list[Any]]:
    """Six steps of a line from ``start`` on, and an overflow after the fourth: its weight, and what was kept."""
    models = [nn.Sequential(Line()) for _ in range(2)]

    def run(transport: ThreadTransport) -> tuple[Tensor, Any]:
        models[transport.rank][0].load_state_dict({"weight": weight})
        engine = make_engine(
            models[transport.rank], line_sum, transport, schedule="1f1b", pipeline=1, data=2, count=1,
            optimizer=partial(torch.optim.SGD, lr=1.0), scaling=LossScaling(initial_scale=4.0, samples=4),
        )  # fmt: skip
        engine.reduce_by(partial(compression_of(section).reducer, section))
        load_reducer_states(engine, transport.rank, 2, saved)
        engine.start_at(start)
        for at, batch in enumerate(batches[start : start + 6]):
            engine.submit(part_of(batch, transport, 1, 2))
            if at == 3:
                engine.submit(part_of((torch.full((4, 6), math.inf), batch[1]), transport, 1, 2))
        engine.drain()
        return weights_of(engine)["0.weight"], own_reducer_states(engine, transport.rank)

    found = run_ranks(2, run)
    return found[0][0], [state for _, state in found]


@pytest.mark.parametrize("name", ["bf16", "topk", "randomk", "signsgd", "gradzip"])
def test_residuals_telescope(name: str) -> None:
    """What was applied and what is left over is the sum of all gradients, over overflows, a resume and plain steps."""
    generator = torch.Generator().manual_seed(7)
    batches = [(torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(12)]
    whole = torch.stack([target.T @ given for given, target in batches]).sum(dim=0)
    first = section_of(name, start_step=2, error_feedback=True)
    weight, saved = part_of_line(first, batches, 0, torch.zeros(4, 6), [])
    later = section_of(name, start_step=8, error_feedback=True)
    weight, saved = part_of_line(later, batches, 6, weight, saved)
    left = torch.stack([state["states"]["0.weight"]["residual"] for state in saved]).sum(dim=0)
    rounded = 2e-1 if name == "bf16" else 1e-4  # sums are rounded to the format, too
    assert torch.allclose(-4 * weight + left, whole, atol=rounded)
    assert name == "bf16" or float(left.abs().max()) > 0.1


@pytest.mark.parametrize("name", ["randomk", "powersgd"])
def test_a_run_that_goes_on_has_the_same_bits(name: str) -> None:
    batches = make_batches(6)
    whole = Ranks(section_of(name), data=2, optimizer=partial(torch.optim.SGD, lr=0.05))
    expected = whole.train(batches)
    parts = Ranks(section_of(name), data=2, optimizer=partial(torch.optim.SGD, lr=0.05))
    weights = parts.train(batches[:3])
    found = parts.train(batches[3:], start=3, weights=weights)
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize("name", ["none", *KEYS])
def test_bytes_are_counted_as_the_formula_says(name: str) -> None:
    section, replicas = section_of(name) if name != "none" else CompressionConfig(), 3
    ranks = Ranks(section, data=replicas)
    ranks.train(make_batches(2))
    shapes = [tuple(parameter.shape) for parameter in make_model().parameters()]
    expected = compression_of(section).bytes_in_a_step(Wire(section, shapes, 4, replicas))
    assert ranks.sent == [pytest.approx(2 * expected)] * replicas
