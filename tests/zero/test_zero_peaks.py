"""Predicted peaks of ranks under ZeRO 2, whose partitions end within weights, are the counted ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_profiles import layer, model
from zero_ranks import train_groups

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.plan.memory.weight_places import weight_places

SCALARS = 64  # bytes of losses and headers that a rank does not have at its peak
ASKED = ("model.target=zero_model:model", "zero.stage=2", "parallelism.data=2", "optimizer=sgd")
RUNS = {
    "several": ("schedule.microbatches=2",),
    "several_narrow": ("schedule.microbatches=2", "precision=bf16"),
    "one_narrow": ("precision=bf16",),
}
PIPELINED = {f"pipe_{name}": (*more, "parallelism.pipeline=2") for name, more in RUNS.items()}


def test_a_part_of_a_stage_touches_the_weights_that_it_cuts() -> None:
    layers = [layer(trained_shapes=((2, 3), (3,))), layer(trained_shapes=((4,),)), layer(gradient_bytes=20)]
    places = weight_places(model(layers), 4)  # 6, 3 | 4 | 5, and nothing of the loss
    assert places.touched(0, 2, 0, 9) == 9
    assert places.touched(0, 2, 0, 10) == 13
    assert places.touched(0, 2, 7, 14) == 12
    assert places.touched(0, 2, 9, 18) == 9
    assert places.touched(1, 2, 0, 5) == 9
    assert places.touched(1, 1, 2, 4) == 4
    assert places.touched(0, 1, 13, 26) == 0  # nothing but padding


def test_each_replica_keeps_whole_the_gradients_of_the_weights_that_it_shares() -> None:
    config = resolve(["model=mlp", "hardware=v100_32gb", "schedule.microbatches=2", *ASKED[1:]])
    sizes = (1000, 1000, 1500)  # the first replica updates 750 elements of the second weight, the other one 250
    layers = [
        layer(
            weight_bytes=4 * size, gradient_bytes=4 * size, largest_parameter_bytes=4 * size, trained_shapes=((size,),)
        )
        for size in sizes
    ]
    first, second = make_plan(config, model(layers)).peak_memory_bytes
    assert second - first == 4 * (2500 - 2000)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_counted_peaks_are_the_predicted_ones_of_every_rank(tmp_path: Path) -> None:
    groups = [(2, RUNS), (4, PIPELINED)]
    trained = train_groups(
        tmp_path, [(n, {name: [*ASKED, *more] for name, more in runs.items()}) for n, runs in groups]
    )
    beyond = {}
    for name, result in trained.items():
        peaks = result.record["peak_memory_bytes"]
        beyond[name] = [real - said for real, said in zip(peaks["measured"], peaks["predicted"], strict=True)]
    assert {name: gaps for name, gaps in beyond.items() if not all(-SCALARS <= gap <= 0 for gap in gaps)} == {}
    said = trained["several"].record["peak_memory_bytes"]["predicted"]
    assert said[0] != said[1]
