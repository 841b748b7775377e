"""Activation checkpoints in traced models: the same bits, one more forward, the predicted peak."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of, uniform
from narrow import present
from small_models import ZOO
from test_zoo_models import (
    COUNT,
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
from torch import nn

from runner.engine.memory_meter import MemoryMeter
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.install import install
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.policies import solve
from runner.memory.solve.values import ActivationPlan, PolicyOptions
from runner.model.fake import fake_tensors
from runner.model.layers import StageModule
from runner.model.live_tracker import LiveTracker
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.stages.figures import stage_figures
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower


def planned(
    name: str, policy: PolicyOptions, pipeline: int, samples: int
) -> tuple[ModelProfile, list[tuple[int, int]], ActivationPlan]:
    """The chain's profile, its partition and the policy's plan."""
    case = ZOO[name]
    chain = traced(case, torch.float32, pipeline)
    partition = uniform(len(chain), pipeline)
    inputs, targets = batch_of(case, samples, 0)
    profile = profile_layers(copied(chain), inputs, targets, case.loss, torch.float32)
    return profile, partition, solve(profile, partition, policy)


@pytest.mark.parametrize("name", ["resnet", pytest.param("mixture", marks=pytest.mark.costly)])
def test_recomputed_segments_give_the_same_bits(name: str) -> None:
    case = ZOO[name]
    batches, validation = [batch_of(case, SAMPLES, seed) for seed in range(STEPS)], batch_of(case, 7, 50)
    _, _, plan = planned(name, PolicyOptions("full"), 2, 3)

    def prepare(stage: StageModule, number: int) -> None:
        install(stage, plan.stages[number])

    check(case, "fp32", "1f1b", 2, batches, validation, prepare=prepare)
    kept = in_a_pipeline(case, batches, validation, "fp32", "1f1b", 2)
    again = in_a_pipeline(case, batches, validation, "fp32", "1f1b", 2, prepare=prepare)
    assert again[0] == kept[0]
    assert [n for n in kept[1] if not torch.equal(again[1][n], kept[1][n])] == [], "buffers too: updated once"


@pytest.mark.parametrize("recomputes", [False, True])
def test_one_more_forward_per_microbatch_of_a_segment(recomputes: bool) -> None:
    case = ZOO["dropout"]
    calls: Counter[Any] = Counter()
    _, _, plan = planned("dropout", PolicyOptions("full"), 2, 3)

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


@pytest.mark.parametrize(
    ("name", "policy", "schedule"),
    [
        ("unet", PolicyOptions(), "zb_v"),  # I and W, and two stages on each rank
        pytest.param("tied_gpt", PolicyOptions("selective", save_ops="matmuls"), "1f1b", marks=pytest.mark.costly),
    ],
)
def test_the_measured_peak_of_traced_models_is_the_predicted_one(
    name: str, policy: PolicyOptions, schedule: str
) -> None:
    case, pipeline, count, batch = ZOO[name], 2, 4, 16
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


def test_the_state_of_the_generator_that_segments_hand_on_is_counted_alike_in_profiles_and_runs() -> None:
    chain = copied(traced(ZOO["dropout"], torch.float32, 2))
    batch = batch_of(ZOO["dropout"], 3, 0)[0]

    def counted(segments: list[nn.Module], value: Any) -> list[int]:
        found = []
        with LiveTracker() as tracker:
            for segment in segments[:-1]:
                value = segment(value)
                found.append(tracker.counted_bytes(value[-1]))
        return found

    real = [present(layer.given) for layer in chain]
    of_run = counted(real, batch)
    assert of_run.count(torch.get_rng_state().nbytes) > 1
    with fake_tensors():
        assert counted(deepcopy(real), torch.empty_like(batch)) == of_run
