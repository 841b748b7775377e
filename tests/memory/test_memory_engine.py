"""Policies in the engine: the same bits as without, one more forward, and the memory that was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from covering import covering
from layouts import make_engine, part_of, train_in_threads, uniform
from plan_profiles import layer
from plan_profiles import model as profile_of
from torch import nn

from runner.engine.measure.memory_meter import TRACKED_STEPS, MemoryMeter
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.install import install
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.policies import solve
from runner.memory.solve.values import PolicyOptions
from runner.model.compiled import compile_layers
from runner.model.layers import StageModule, layers_of
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.stages.figures import stage_figures
from runner.profiling.model import profile_layers
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower
from runner.zoo import gpt
from runner.zoo.gpt import Gpt

POLICIES = {
    "none": PolicyOptions(),
    "full": PolicyOptions("full"),
    "periodic": PolicyOptions("periodic", every=2),
    "matmuls": PolicyOptions("selective", save_ops="matmuls"),
    "attention": PolicyOptions("selective", save_ops="attention"),
    "every_second_matmul": PolicyOptions("selective", save_ops="every_second_matmul"),
    "manual": PolicyOptions("manual", layers=("1", "3")),
}
COUNT = 3  # micro-batches
VOCABULARY, LENGTH = 61, 16


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def make_gpt(dropout: float = 0.2, width: int = 16, blocks: int = 3) -> Gpt:
    torch.manual_seed(3)
    return gpt.build(VOCABULARY, LENGTH, width, blocks, 2, dropout)


def tokens(batch: int, steps: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randint, 0, VOCABULARY, (batch, LENGTH), generator=generator)
    return [(draw(), draw()) for _ in range(steps)]


def make_convolutions() -> nn.Sequential:
    """Layers with batch norm and dropout; the last but one passes a dict, and one saves its own output."""

    class Twice(nn.Module):
        def forward(self, value: torch.Tensor) -> dict[str, Any]:
            return {"left": value, "right": [value * 2, 3]}

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 5)

        def forward(self, value: dict[str, Any]) -> Any:
            joined = value["left"] + value["right"][0] * value["right"][1]
            return self.head(joined.mean((2, 3)))

    torch.manual_seed(4)
    block = partial(nn.Conv2d, kernel_size=3, padding=1)
    return nn.Sequential(
        nn.Sequential(block(3, 8), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(block(8, 8), nn.BatchNorm2d(8), nn.Dropout(0.3), nn.Tanh()),
        nn.Sequential(block(8, 8), nn.BatchNorm2d(8, momentum=None)),
        Twice(),
        Join(),
    )


def pictures(batch: int = 9, steps: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(batch, 3, 8, 8, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(steps)
    ]


def installer(
    model: Callable[..., Any], pipeline: int, options: PolicyOptions, *, to_host: bool = False, compiled: bool = False
) -> Callable[..., Any]:
    sources = layers_of(model(), 0)
    partition = uniform(len(sources), pipeline)
    rows = tuple(replace(layer(), name=source.name) for source in sources)
    plan = solve(profile_of(rows), partition, options, to_host=to_host)

    def prepare(stage: StageModule, position: int) -> None:
        install(stage, plan.stages[position], to_host=plan.to_host)
        if compiled:
            compile_layers(stage)

    return prepare


def train(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    pipeline: int,
    prepare: Callable[..., Any] | None = None,
    schedule: str = "1f1b",
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Plain SGD: weights after two steps show every bit of the gradients."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    return train_in_threads(
        model, loss, batches, pipeline=pipeline, data=1, schedule=schedule, count=COUNT, optimizer=sgd, prepare=prepare
    )


class Copies(torch.autograd.graph.saved_tensors_hooks):
    """Like torch's ``save_on_cpu`` on a GPU: autograd keeps copies, and the backward gets copies of these."""

    made = 0

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(Copies.copy, Copies.copy)

    @staticmethod
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        Copies.made += 1
        return tensor.detach().clone()


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any]] = {
    "gpt": (make_gpt, token_loss, tokens(7)),
    "convolutions": (make_convolutions, nn.functional.cross_entropy, pictures()),
}


@pytest.mark.parametrize("to_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_losses_weights_and_buffers_are_the_same_bits(
    case: str, policy: str, pipeline: int, to_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU torch moves nothing to the host; copies take the place of its moves there."""
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Copies)
    Copies.made = 0
    model, loss, batches = CASES[case]
    expected_losses, expected = train(model, loss, batches, pipeline)
    losses, state = train(model, loss, batches, pipeline, installer(model, pipeline, POLICIES[policy], to_host=to_host))
    assert losses == expected_losses
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    assert (Copies.made > 0) == to_host


def test_running_statistics_are_updated_once_per_microbatch() -> None:
    model, loss, batches = CASES["convolutions"]
    _, state = train(model, loss, batches, 1, installer(model, 1, POLICIES["full"]))
    assert int(state["0.1.num_batches_tracked"]) == COUNT * 2  # steps


class Count(nn.Module):
    """A layer that counts its forwards."""

    calls: Counter[int] = Counter()

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(6, 6)

    def forward(self, value: torch.Tensor | dict[str, torch.Tensor | list[torch.Tensor | int]]) -> Any:
        if torch.is_grad_enabled():
            Count.calls[self.number] += 1
        return self.linear(value).tanh()


@pytest.mark.parametrize("policy", ["none", "full", "periodic", "manual"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_one_more_forward_per_microbatch_of_a_recomputed_layer(policy: str, pipeline: int) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Count(number) for number in range(4)))

    batches = [(torch.randn(6, 6), torch.randn(6, 6))]
    Count.calls.clear()
    train(make, nn.functional.mse_loss, batches, pipeline, installer(make, pipeline, POLICIES[policy]))
    again = {"none": (), "full": range(4), "periodic": range(4), "manual": (1, 3)}[policy]
    assert Count.calls == {number: COUNT * (2 if number in again else 1) for number in range(4)}


def test_a_forward_without_gradients_recomputes_nothing() -> None:
    stage_of = []
    installed: Callable[..., None] | None = installer(make_gpt, 1, POLICIES["full"], to_host=True)

    def run(transport: ThreadTransport) -> Any:
        engine = make_engine(
            make_gpt(), token_loss, transport, schedule="1f1b", pipeline=1, data=1, count=COUNT,
            optimizer=partial(torch.optim.SGD, lr=0.1), prepare=installed,
        )  # fmt: skip
        stage_of.append(engine.stages[0])
        return engine.evaluate(part_of(tokens(7)[0], transport, 1, 1))

    with_policy = run_ranks(1, run)
    installed = None
    assert run_ranks(1, run) == with_policy


class Changing(nn.Module):
    """Reads a buffer that it also changes: a second forward must see what the first one saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.ones(4))

    def forward(self, value: torch.Tensor) -> Any:
        result = self.linear(value * self.seen.clone())
        self.seen.add_(result.detach().mean(0))
        return result.sin()


def test_a_buffer_that_a_forward_reads_and_changes_is_seen_as_it_was() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(Changing(), Changing(), nn.Linear(4, 2))

    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(2)]
    expected = train(make, nn.functional.mse_loss, batches, 1, schedule="gpipe")
    got = train(make, nn.functional.mse_loss, batches, 1, installer(make, 1, POLICIES["full"]), schedule="gpipe")
    assert got[0] == expected[0]
    assert all(torch.equal(got[1][name], expected[1][name]) for name in expected[1])


@cache
def measured_and_predicted(policy: str, pipeline: int, dropout: float) -> tuple[list[int], tuple[int, ...]]:
    options = POLICIES[policy]
    count, batch = 4, 32
    make = partial(make_gpt, dropout, 32, 4)
    ((inputs, targets),) = tokens(batch, 1)
    sources = layers_of(make(), 0)
    partition = uniform(len(sources), pipeline)
    profile = profile_layers(sources, inputs[: batch // count], targets[: batch // count], token_loss, torch.float32)
    profile = replace(profile, optimizer_bytes_per_gradient_byte=2.0)
    plan = solve(profile, partition, options)
    program = lower(build("1f1b", ranks=pipeline, microbatches=count))
    figures = stage_figures(adjusted(profile, plan), partition)
    predicted = predict_memory(program, profile, figures, MemoryNeeds(batch)).peak_bytes
    models = [make() for _ in range(pipeline)]
    adamw = partial(torch.optim.AdamW, foreach=False)

    def run(transport: ThreadTransport) -> Any:
        engine = make_engine(
            models[transport.rank], token_loss, transport, schedule="1f1b", pipeline=pipeline, data=1, count=count,
            optimizer=adamw, prepare=lambda stage, position: install(stage, plan.stages[position]),
        )  # fmt: skip
        meter = MemoryMeter(engine)
        for _ in range(2):
            part = part_of((inputs, targets), transport, pipeline, 1)
            with meter.step(part):
                engine.submit(part)
        engine.drain()
        return meter.peak_bytes

    return run_ranks(pipeline, run), predicted


@pytest.mark.parametrize(
    ("dropout", "pipeline", "policy"),
    covering({"dropout": [0.0, 0.1], "pipeline": [1, 2], "policy": POLICIES}, strength=2),
)
def test_the_measured_peak_is_the_predicted_one(policy: str, pipeline: int, dropout: float) -> None:
    measured, predicted = measured_and_predicted(policy, pipeline, dropout)
    for found, expected in zip(measured, predicted, strict=True):
        assert found == pytest.approx(expected, rel=0.05)
    plain, _ = measured_and_predicted("none", pipeline, dropout)
    if policy != "none":
        assert sum(measured) < sum(plain)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_compiled_layers_are_equal_to_rounding(policy: str, pipeline: int) -> None:
    model, loss, batches = CASES["gpt"]
    expected_losses, expected = train(model, loss, batches, pipeline)
    prepare = installer(model, pipeline, POLICIES[policy], compiled=True)
    losses, state = train(model, loss, batches, pipeline, prepare)
    torch.testing.assert_close(losses[0], expected_losses[0], rtol=1e-5, atol=0)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_compiled_layers_stay_compiled_after_the_steps_whose_memory_is_measured() -> None:
    def run(transport: ThreadTransport) -> Any:
        engine = make_engine(
            make_gpt(), token_loss, transport, schedule="1f1b", pipeline=1, data=1, count=COUNT,
            optimizer=partial(torch.optim.SGD, lr=0.1), prepare=lambda stage, position: compile_layers(stage),
        )  # fmt: skip
        engine.options = replace(engine.options, compile=True)
        meter = MemoryMeter(engine)
        part = part_of(tokens(6)[0], transport, 1, 1)
        for _ in range(TRACKED_STEPS):
            with meter.step(part):
                engine.submit(part)
        return engine.stages[0](part.inputs, None).grad_fn.name()

    assert "Compiled" in run_ranks(1, run)[0]
