"""Predictions of weights take time before forwards and backwards, and compressors in sums; the plan counts both."""

from __future__ import annotations

import pytest
from plan_profiles import layer, model

from runner.config.schema import RunConfig
from runner.plan.make import make_plan
from runner.plan.values import RunPlan

RATE = 0.25  # seconds of an update per byte of gradient


def planned(schedule: str, prediction: str | None, *, microbatches: int = 1, optimizer: str = "adamw") -> RunPlan:
    config = RunConfig(memory_limit="1GB")
    config.schedule.name, config.schedule.microbatches = schedule, microbatches
    config.parallelism.pipeline, config.data.batch_size = 2, 4
    config.optimizer.name, config.weight_prediction.name = optimizer, prediction
    if optimizer == "sgd":
        config.optimizer.momentum = 0.9
    return make_plan(config, model([layer()] * 4, optimizer_seconds_per_byte=RATE))


@pytest.mark.parametrize(
    ("schedule", "prediction", "optimizer", "microbatches", "before"),
    [
        ("spectrain", None, "sgd", 1, (1, 1)),  # anew before each forward and backward
        ("xpipe", None, "adamw", 4, (0.25, 0.25)),  # once in a window of four
        ("pipedream", "nesterov", "adamw", 1, (1, 0)),  # backwards use what their forward has used
        ("1f1b", "xgrad", "adamw", 4, (0.25, 0)),  # no forward is late: once in a step
        ("pipedream", "none", "adamw", 1, (0, 0)),
    ],
)
def test_predictions_are_counted(
    schedule: str, prediction: str | None, optimizer: str, microbatches: int, before: tuple[float, float]
) -> None:
    plan = planned(schedule, prediction, microbatches=microbatches, optimizer=optimizer)
    costs, (forward, backward) = plan.time.costs, before
    first = plan.figures[0]
    update = RATE * first.gradient_bytes
    assert update > 0
    ratio = 4 / microbatches / plan.profile.samples
    assert costs.F[0] == pytest.approx(first.forward_seconds * ratio + forward * update)
    assert costs.B[0] == pytest.approx(first.backward_seconds * ratio + backward * update)


def test_what_a_compressor_computes_is_counted() -> None:
    config = RunConfig(memory_limit="1GB")
    config.parallelism.data, config.data.batch_size = 2, 4
    config.compression.name, config.compression.density = "topk", 0.1
    config.transport.bytes_per_second = 8.0
    layers = [layer(trained_shapes=((10,),))] * 2
    alone, counted = (
        make_plan(config, model(layers, compression_seconds_per_byte=per_byte)).time.costs for per_byte in (0.0, 0.5)
    )
    # Each of the two tensors sends one value and its place, 8 bytes: a second each, with 80 bytes of gradients.
    assert alone.reduce[0] == pytest.approx(2.0)
    assert counted.reduce[0] == pytest.approx(2.0 + 0.5 * 80)
