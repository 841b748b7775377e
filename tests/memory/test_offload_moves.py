"""Saved activations in the host's memory: the same bits, the planned bytes, and a bounded pool that is left empty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of, uniform
from test_memory_engine import CASES, COUNT, SCALARS, Case
from torch import Tensor, nn

from runner.engine.memory_meter import MemoryMeter
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.host_buffers import HostBuffers
from runner.memory.apply.host_lanes import SlowLink, make_lane
from runner.memory.apply.install import StageOffload, install
from runner.memory.apply.mover import Mover
from runner.memory.apply.trip import Trip
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.offload import Offload, moving
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.policies import solve
from runner.memory.solve.program import moves_tensors
from runner.memory.solve.values import PolicyOptions
from runner.model.layers import StageModule, layers_of
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import in_flight_microbatches, predict_memory
from runner.plan.stages.figures import stage_figures
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower

STEPS = 2
POLICIES = {
    "none": PolicyOptions(),
    "full": PolicyOptions("full"),
    "manual": PolicyOptions("manual", layers=("1", "3")),
}
EVERY_SECOND = Offload("every_second", lambda chain, program: moving(program, set(chain.indices[1::2])))


@dataclass
class Ran:
    """What a run did.

    Args:
        weights: the weights at its end, by global name.
        moved, left, held: by rank, the bytes that were moved, left in the pool after each step, and held by the pool.
        planned, capacity: by rank, the bytes that the plan moves in a step, and the size of its pool.
        peak, predicted: by rank, the peak of live tensors of a step, and the plan's.
    """

    losses: list[list[float]]
    weights: dict[str, Tensor]
    moved: list[int]
    left: list[list[int]]
    held: list[int]
    planned: list[int]
    capacity: list[int]
    peak: list[int]
    predicted: tuple[int, ...]


@cache
def profiled(case: str | Case, samples: int) -> ModelProfile:
    make, loss, draw = CASES[case] if isinstance(case, str) else case
    inputs, targets = (value[: -(-samples // COUNT)] for value in draw(samples))
    profile = profile_layers(layers_of(make(), 0), inputs, targets, loss, torch.float32)
    return replace(profile, optimizer_bytes_per_gradient_byte=0.0)


def run(
    case: str | Case,
    offload: Offload | None,
    *,
    pipeline: int = 1,
    schedule: str = "1f1b",
    policy: str = "none",
    samples: int = 2 * COUNT,
    link: SlowLink | None = None,
) -> Ran:
    make, loss, draw = CASES[case] if isinstance(case, str) else case
    batch = draw(samples)
    profile = profiled(case, samples)
    partition = uniform(len(profile.layers), pipeline)
    order = build(schedule, ranks=pipeline, microbatches=COUNT)
    plan = solve(profile, partition, POLICIES[policy], offload=offload)
    figures = stage_figures(adjusted(profile, plan), partition)
    in_flight = in_flight_microbatches(order)
    predicted = predict_memory(lower(order), profile, figures, MemoryNeeds(samples, temporaries=1)).peak_bytes
    capacity = [count * each.moved_bytes for count, each in zip(in_flight, figures, strict=True)]
    models = [make() for _ in range(pipeline)]

    def one(transport: ThreadTransport) -> tuple[Any, ...]:
        rank = transport.rank
        lanes = tuple(make_lane(torch.device("cpu"), link or SlowLink()) for _ in range(2))
        pool = HostBuffers(capacity[rank])
        mover = Mover(torch.device("cpu"), pool, (lanes[0], lanes[1]), figures[rank].leaving_bytes)
        moves = StageOffload(mover) if moves_tensors(plan.stages[rank]) else None

        def prepare(stage: StageModule, number: int) -> None:
            install(stage, plan.stages[number], offload=moves)

        sgd = partial(torch.optim.SGD, lr=0.1, foreach=False)
        engine = make_engine(
            models[rank], loss, transport, schedule=order, pipeline=pipeline, data=1, count=COUNT,
            optimizer=sgd, prepare=prepare, offload=moves,
        )  # fmt: skip
        meter = MemoryMeter(engine)
        losses, left = [], []
        for _ in range(STEPS):
            part = part_of(batch, transport, pipeline, 1)
            with meter.step(part):
                losses += [step.loss for step in engine.submit(part)]
            left.append(pool.in_use)
        engine.drain()
        weights = {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}
        return losses, weights, mover.bytes_moved, left, pool.held, meter.peak_bytes

    found = run_ranks(pipeline, one)
    return Ran(
        losses=[each[0] for each in found],
        weights={name: value for each in found for name, value in each[1].items()},
        moved=[each[2] for each in found],
        left=[each[3] for each in found],
        held=[each[4] for each in found],
        planned=[2 * COUNT * each.moved_bytes for each in figures],
        capacity=capacity,
        peak=[each[5] for each in found],
        predicted=predicted,
    )


class Doubled(nn.Module):
    """Saves nothing, and makes a gradient of its own."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 2.0


@pytest.mark.parametrize(("end", "schedule"), [(nn.Tanh, "1f1b"), (Doubled, "gpipe")])
def test_gradients_that_are_made_before_anything_moved_is_asked_for_count(schedule: str, end: type[nn.Module]) -> None:
    """They are there beside what is still leaving, which the first use of something moved frees."""

    def make() -> nn.Module:
        torch.manual_seed(7)
        wide = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Tanh(), nn.Tanh(), end())
        return nn.Sequential(nn.Sequential(nn.Linear(32, 16), nn.Tanh()), wide, nn.Linear(256, 8), nn.Tanh())

    def draw(samples: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(6)
        return torch.randn(samples, 32, generator=chance), torch.randn(samples, 8, generator=chance)

    case = make, nn.functional.mse_loss, draw
    moved = run(case, OFFLOADS["async"], pipeline=2, schedule=schedule, samples=300 * COUNT)
    for measured, predicted in zip(moved.peak, moved.predicted, strict=True):
        assert 0.99 * predicted <= measured <= predicted + SCALARS


@pytest.mark.parametrize(
    ("case", "layout", "name", "samples"),
    [
        ("convolutions", (2, "zb_h1"), "vdnn_all", 6),
        ("gpt", (2, "1f1b"), "async", 7),  # micro-batches of unequal size
    ],
)
def test_bits_are_those_of_a_run_that_moves_nothing(
    case: str, layout: tuple[int, str], name: str, samples: int
) -> None:
    pipeline, schedule = layout
    plain = run(case, None, pipeline=pipeline, schedule=schedule, samples=samples)
    moved = run(case, OFFLOADS[name], pipeline=pipeline, schedule=schedule, samples=samples)
    assert plain.moved == [0] * pipeline
    assert moved.losses == plain.losses
    assert [each for each in plain.weights if not torch.equal(plain.weights[each], moved.weights[each])] == []
    assert sum(moved.planned) > 0
    if samples % COUNT:
        assert all(found < STEPS * planned for found, planned in zip(moved.moved, moved.planned, strict=True))
    else:
        assert moved.moved == [STEPS * each for each in moved.planned]
    assert moved.left == [[0] * STEPS] * pipeline
    assert all(held <= most for held, most in zip(moved.held, moved.capacity, strict=True))


def test_what_is_computed_again_moves_its_input_alone() -> None:
    case, pipeline = "convolutions", 2
    plain = run(case, None, pipeline=pipeline)
    moved = run(case, OFFLOADS["async"], pipeline=pipeline, policy="full")
    assert moved.losses == plain.losses
    assert [name for name in plain.weights if not torch.equal(plain.weights[name], moved.weights[name])] == []
    assert moved.moved == [STEPS * each for each in moved.planned]
    assert moved.left == [[0] * STEPS] * pipeline
    everything = run(case, OFFLOADS["async"], pipeline=pipeline)
    assert sum(moved.moved) < sum(everything.moved)


@pytest.mark.parametrize(("case", "policy"), [("gpt", "manual"), ("convolutions", "full")])
def test_what_a_layer_has_let_go_of_moves_with_the_next_one(case: str, policy: str) -> None:
    """A layer that is computed again and saves nothing keeps no input; the next one that does is moved, or stays."""
    plain, moved = (run(case, each, policy=policy) for each in (None, EVERY_SECOND))
    assert moved.losses == plain.losses
    assert moved.moved == [STEPS * each for each in moved.planned]
    assert all(found <= most + SCALARS for found, most in zip(moved.peak, moved.predicted, strict=True))


@pytest.mark.parametrize(
    ("case", "schedule", "link"), [("gpt", "zb_h1", SlowLink(0.002)), ("convolutions", "gpipe", None)]
)
def test_the_peak_of_the_device_is_less_and_within_the_plan(case: str, schedule: str, link: SlowLink | None) -> None:
    pipeline = 2
    plain = run(case, None, pipeline=pipeline, schedule=schedule, samples=16 * COUNT)
    moved = run(case, OFFLOADS["async"], pipeline=pipeline, schedule=schedule, samples=16 * COUNT, link=link)
    assert all(found <= most + SCALARS for found, most in zip(moved.peak, moved.predicted, strict=True))
    if schedule != "zb_h1":  # predictions of I are bounds, also if nothing is moved
        assert all(most <= 1.01 * found for found, most in zip(moved.peak, moved.predicted, strict=True))
    assert sum(moved.peak) < sum(plain.peak)


def test_a_pool_holds_at_most_its_capacity_and_uses_buffers_again() -> None:
    pool = HostBuffers(100)
    first = pool.take(60)
    with pytest.raises(RuntimeError, match=r"need 110 bytes of host memory at once, planned were 100"):
        pool.take(50)
    pool.give_back(first)
    assert pool.take(60) is first
    pool.give_back(first)
    assert pool.take(50).nbytes() == 50  # the other size is dropped for it
    assert (pool.held, pool.in_use) == (50, 50)


def mover_of(capacity: int, room: int) -> Mover:
    device = torch.device("cpu")
    return Mover(device, HostBuffers(capacity), (make_lane(device, SlowLink()), make_lane(device, SlowLink())), room)


def test_a_saved_tensor_that_is_changed_before_it_has_left_is_told() -> None:
    mover = mover_of(1 << 20, 1 << 10)
    trip = Trip(mover, [])
    doubled = torch.ones(100, requires_grad=True) * 2
    with trip.saving(moved=True):
        output = doubled.sin()
    with torch.no_grad():
        doubled.add_(1)
    trip.leave(None)
    assert output.requires_grad
    with pytest.raises(RuntimeError, match=r"shape \(100,\) that autograd has saved was changed in place"):
        mover.require_empty()


def test_what_nobody_needs_any_more_leaves_the_pool() -> None:
    mover = mover_of(1 << 20, 1 << 10)
    trip = Trip(mover, [])
    with trip.saving(moved=True):
        output = torch.ones(100, requires_grad=True).sin()
    trip.leave(None)
    with pytest.raises(RuntimeError, match="400 bytes of activations are left"):
        mover.require_empty()
    del output
    mover.require_empty()
