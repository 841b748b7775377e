"""Activation checkpoints and float16 in traced models: the same bits, one more forward, the predicted peak."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of, uniform
from small_models import ZOO
from test_zoo_models import (
    COUNT,
    ENGINE,
    SAMPLES,
    SEED,
    STEPS,
    batch_of,
    check,
    copied,
    in_a_pipeline,
    sgd,
    traced,
)

from runner.engine.memory_meter import MemoryMeter
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.install import install
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.policies import solve
from runner.memory.solve.values import ActivationPlan, PolicyOptions
from runner.model.layers import StageModule
from runner.model.traced.segments import Segment
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.stages.figures import stage_figures
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower

POLICIES = {
    "none": PolicyOptions(),
    "full": PolicyOptions("full"),
    "periodic": PolicyOptions("periodic", every=2),
    "selective": PolicyOptions("selective", save_ops="matmuls"),
}


def planned(
    name: str, policy: str, pipeline: int, samples: int, precision: str = "fp32"
) -> tuple[ModelProfile, list[tuple[int, int]], ActivationPlan]:
    """The chain's profile, its partition and the policy's plan."""
    case, dtype = ZOO[name], ENGINE[precision].get("dtype", torch.float32)
    chain = traced(case, dtype, pipeline)
    partition = uniform(len(chain), pipeline)
    inputs, targets = batch_of(case, samples, 0)
    profile = profile_layers(copied(chain), inputs, targets, case.loss, dtype)
    return profile, partition, solve(profile, partition, POLICIES[policy])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "policy", "precision"),
    [
        ("dropout", "full", "fp32"),
        ("resnet", "full", "fp32"),
        ("tied_gpt", "selective", "fp16"),
        ("mixture", "periodic", "fp16_mixed"),
    ],
)
def test_recomputed_segments_give_the_same_bits(name: str, policy: str, precision: str) -> None:
    case = ZOO[name]
    batches, validation = [batch_of(case, SAMPLES, seed) for seed in range(STEPS)], batch_of(case, 7, 50)
    _, _, plan = planned(name, policy, 2, 3, precision)

    def prepare(stage: StageModule, number: int) -> None:
        install(stage, plan.stages[number])

    check(case, precision, "1f1b", 2, batches, validation, prepare=prepare)
    kept = in_a_pipeline(case, batches, validation, precision, "1f1b", 2)
    again = in_a_pipeline(case, batches, validation, precision, "1f1b", 2, prepare=prepare)
    assert again[0] == kept[0]
    assert [n for n in kept[1] if not torch.equal(again[1][n], kept[1][n])] == [], "buffers too: updated once"


@pytest.mark.costly
@pytest.mark.parametrize(("stage", "policy"), [(0, "none"), (1, "full"), (2, "none")])
def test_an_overflow_on_any_stage_of_a_tied_model_skips_the_step_on_every_rank(stage: int, policy: str) -> None:
    case = ZOO["tied_gpt"]
    armed: list[Any] = []
    _, _, plan = planned("tied_gpt", policy, 3, 3, "fp16")

    def overflow(
        module: Segment,
        given: tuple[object, ...],
        output: torch.Tensor | tuple[torch.Tensor | int, ...],
    ) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        wanted = next((t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad), None)
        if armed and wanted is not None:
            wanted.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]  # the library's

    def prepare(module: StageModule, number: int) -> None:
        if number == stage:
            module.layers[-1].register_forward_hook(overflow)
        install(module, plan.stages[number])

    chains = [copied(traced(case, torch.float16, 3)) for _ in range(3)]

    def run(transport: ThreadTransport) -> Any:
        engine = make_engine(
            chains[transport.rank], case.loss, transport, schedule="1f1b", pipeline=3, data=1, count=COUNT,
            optimizer=sgd, seed=SEED, prepare=prepare, **ENGINE["fp16"],
        )  # fmt: skip
        found = []
        for step in range(3):
            transport.all_reduce(torch.zeros(1), range(3)).wait()  # nobody is a step ahead
            armed[:] = [True] if step == 1 else []
            finished = engine.submit(part_of(batch_of(case, SAMPLES, step), transport, 3, 1))
            transport.all_reduce(torch.zeros(1), range(3)).wait()
            state = {k: v.clone() for s in engine.stages.values() for k, v in s.global_state().items()}
            found.append((finished[0].skipped, engine.update.scale.value, state))
        engine.drain()
        return found

    for found in run_ranks(3, run):
        assert [(skipped, scale) for skipped, scale, _ in found] == [(False, 1024.0), (True, 512.0), (False, 512.0)]
        states = [state for _, _, state in found]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), "bitwise unchanged"
        assert any(not torch.equal(states[1][name], states[2][name]) for name in states[1])


@pytest.mark.parametrize("recomputes", [False, True])
def test_one_more_forward_per_microbatch_of_a_segment(recomputes: bool) -> None:
    case = ZOO["dropout"]
    calls: Counter[Any] = Counter()
    _, _, plan = planned("dropout", "full", 2, 3)

    def prepare(stage: StageModule, number: int) -> None:
        for at, layer in enumerate(stage.layers, stage.first_layer):
            layer.register_forward_pre_hook(lambda module, given, at=at: calls.update([at]))
        if recomputes:
            install(stage, plan.stages[number])

    chains = [copied(traced(case, torch.float32, 2)) for _ in range(2)]

    def run(transport: ThreadTransport) -> None:
        engine = make_engine(
            chains[transport.rank], case.loss, transport, schedule="1f1b", pipeline=2, data=1, count=COUNT,
            optimizer=sgd, seed=SEED, prepare=prepare,
        )  # fmt: skip
        engine.submit(part_of(batch_of(case, SAMPLES, 0), transport, 2, 1))
        engine.drain()

    run_ranks(2, run)
    assert calls == dict.fromkeys(range(len(chains[0])), COUNT * (2 if recomputes else 1))


PEAKS = [
    ("unet", "none", "1f1b"),
    ("gpt2", "full", "1f1b"),
    ("tied_gpt", "selective", "1f1b"),
    ("unet", "none", "zb_v"),  # I and W, and two stages on each rank
]


@pytest.mark.costly
@pytest.mark.parametrize(("name", "policy", "schedule"), PEAKS)
def test_the_measured_peak_of_traced_models_is_the_predicted_one(name: str, policy: str, schedule: str) -> None:
    case, pipeline, count, batch = ZOO[name], 2, 4, 32
    order = build(schedule, ranks=pipeline, microbatches=count)
    profile, partition, plan = planned(name, policy, order.stages, batch // count)
    profile = replace(profile, optimizer_bytes_per_gradient_byte=2.0)
    figures = stage_figures(adjusted(profile, plan), partition)
    predicted = predict_memory(lower(order), profile, figures, MemoryNeeds(batch)).peak_bytes
    chains = [copied(traced(case, torch.float32, order.stages)) for _ in range(pipeline)]

    def run(transport: ThreadTransport) -> Any:
        engine = make_engine(
            chains[transport.rank], case.loss, transport, schedule=order, pipeline=pipeline, data=1, count=count,
            optimizer=partial(torch.optim.AdamW, foreach=False),
            prepare=lambda stage, number: install(stage, plan.stages[number]),
        )  # fmt: skip
        meter = MemoryMeter(engine)
        for _ in range(2):
            part = part_of(batch_of(case, batch, 0), transport, pipeline, 1, order)
            with meter.step(part):
                engine.submit(part)
        engine.drain()
        return meter.peak_bytes

    for found, expected in zip(run_ranks(pipeline, run), predicted, strict=True):
        assert found == pytest.approx(expected, rel=0.05)
