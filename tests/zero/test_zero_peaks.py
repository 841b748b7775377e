"""Predicted peaks of ranks under ZeRO, whose partitions end within weights, are the counted ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_profiles import layer, model

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.plan.memory.weight_places import weight_places
from runner.plan.memory.zero import ZeroSharing
from runner.plan.stages.figures import stage_figures
from runner.profile import GradientPeaks

SHARDED = ("zero.stage=2",)


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
    config = resolve(
        ["model=mlp", "hardware=v100_32gb", "schedule.microbatches=2", *SHARDED, "parallelism.data=2", "optimizer=sgd"]
    )
    sizes = (1000, 1000, 1500)  # the first replica updates 750 elements of the second weight, the other one 250
    layers = [
        layer(
            weight_bytes=4 * size, gradient_bytes=4 * size, largest_parameter_bytes=4 * size, trained_shapes=((size,),)
        )
        for size in sizes
    ]
    first, second = make_plan(config, model(layers)).peak_memory_bytes
    assert second - first == 4 * (2500 - 2000)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_replica_holds_buffers_and_frozen_weights_whole(stage: int) -> None:
    sharing = ZeroSharing(
        stage, 4, "none", "none", weight_width=4, master_width=4, states=2.0, bucket_elements=100, temporaries=1
    )
    trained, more = (
        sharing.held(stage_figures(model([layer(gradient_bytes=160, weight_bytes=160 + kept)]), ((0, 0),))[0])
        for kept in (0, 60)
    )
    assert more.weights - trained.weights == 60
    assert (more.gradients, more.optimizer) == (trained.gradients, trained.optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_before_the_first_gradient_of_a_weight_a_backward_has_no_bucket(stage: int) -> None:
    """The loss has no weights, and its backward is the peak: only what ZeRO 3 gathered for the forward is there."""
    config = resolve(["model=mlp", "hardware=v100_32gb", f"zero.stage={stage}", "parallelism.data=2"])
    num_bytes = 40_000
    layers = [
        layer(
            weight_bytes=num_bytes,
            gradient_bytes=num_bytes,
            largest_parameter_bytes=num_bytes,
            trained_shapes=((10_000,),),
            saved_bytes=100_000,
            output_bytes=100_000,
        )
    ]
    without = model(layers)
    heavy = replace(without, loss=replace(without.loss, backward_transient_bytes=10**6))
    (peak, _), (heavier, _) = (make_plan(config, each).peak_memory_bytes for each in (without, heavy))
    parts = make_plan(config, heavy).memory.parts[0]
    assert heavier > peak
    kept = num_bytes if stage == 3 else 0  # its bucket is there all the time
    assert kept <= parts.buffers < kept + num_bytes  # and the step's batch
    assert parts.weights == num_bytes + (num_bytes // 2 if stage == 3 else 0)


def test_gradients_that_are_kept_until_their_reduction_grow_while_activations_are_freed() -> None:
    """Each of three layers saves 10,000 bytes and has 40,000 bytes of gradients; ZeRO 1 reduces after a backward."""
    num_bytes, saved = 40_000, 10_000
    one = layer(
        weight_bytes=num_bytes,
        gradient_bytes=num_bytes,
        largest_parameter_bytes=num_bytes,
        trained_shapes=((10_000,),),
        saved_bytes=saved,
        output_bytes=saved,
        backward_transient_bytes=num_bytes,
        gradient_peaks=GradientPeaks(num_bytes, num_bytes, num_bytes, num_bytes),
    )
    (figures,) = stage_figures(model([one] * 3), [(0, 2)])
    first = saved + saved + 3 * num_bytes  # what the first layer has saved, the gradient of its output, all gradients
    assert 3 * saved + figures.growing_backward_peak_bytes == first
    assert figures.later_backward_peak_bytes == saved + num_bytes


def test_full_buckets_are_reduced_while_later_gradients_wait() -> None:
    """Of weights with 40, 20, 20 and 20 elements, a bucket of 40 takes the first, the next two, and the last."""
    sizes = (40, 20, 20, 20)
    layers = [layer(gradient_bytes=4 * size, trained_shapes=((size,),)) for size in sizes]
    (figures,) = stage_figures(model(layers), [(0, 3)])
    places = weight_places(model(layers), 4)
    sharing = ZeroSharing(1, 2, "none", "none", 4, 4, 2.0, 40, 1, places=places)
    first, second = (sharing.reduction_extra(figures, replica) for replica in range(2))
    assert first.buffers == second.buffers == 4 * 40
    assert first.gradients == max(100, 60 + 40, 60 + 60, 20 + 60 + 40, 0 + 60 + 20) * 4  # 60: the weights it touches
    assert second.gradients == max(100, 60 + 40, 20 + 40, 20 + 60) * 4


def test_a_stage_without_trained_weights_reduces_nothing() -> None:
    (figures,) = stage_figures(model([layer(gradient_bytes=0)] * 2), [(0, 1)])
    sharing = ZeroSharing(1, 2, "none", "none", 4, 4, 2.0, 40, 1)
    assert sharing.reduction_extra(figures).device == 0
