"""Peaks worked out by hand: every layer saves 30, puts out 10, needs 5 more in forward and 12 more in backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from orders import in_order
from plan_profiles import layer, model

from runner.optim.catalogue.registry import OPTIMIZERS
from runner.plan.cut.partition import uniform
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import in_flight_microbatches, predict_memory
from runner.plan.memory.stage_limit import StageMemoryLimit, bytes_of_one
from runner.plan.stages.figures import stage_figures
from runner.plan.values import MemoryParts, MemoryPrediction
from runner.profile import ModelProfile, SharedWeight, SplitBackward
from runner.schedule.catalogue import registry
from runner.schedule.lowering.program import lower
from runner.schedule.values import Action, Op, Schedule


def predicted(
    name: str, ranks: int, microbatches: int, profile: ModelProfile, *, temporaries: int = 0
) -> MemoryPrediction:
    program = lower(registry.build(name, ranks=ranks, microbatches=microbatches))
    figures = stage_figures(profile, uniform(len(profile.layers), ranks))
    samples = microbatches * profile.samples
    return predict_memory(program, profile, figures, MemoryNeeds(samples, temporaries=temporaries))


def test_one_rank_one_microbatch() -> None:
    (parts,) = predicted("1f1b", 1, 1, model([layer()] * 2)).parts
    # Both layers' 60, and in the second layer's backward the 10 of its output's gradient and its 12.
    assert parts == MemoryParts(weights=80, gradients=80, optimizer=160, activations=82, buffers=10)
    assert parts.total == 412


def test_forward_can_be_the_peak() -> None:
    (parts,) = predicted("1f1b", 1, 1, model([layer(forward_transient_bytes=90)] * 2)).parts
    assert parts.activations == 60 + 90


def test_two_stages_of_1f1b() -> None:
    first, last = predicted("1f1b", 2, 2, model([layer()] * 2)).parts
    # Rank 0 in B0: two micro-batches of 30 and the backward's 12; the inputs of two micro-batches are 2 x 7, the
    # gradient received is 10, and so is that of B1, whose receive is posted before B0 starts.
    assert first == MemoryParts(weights=40, gradients=40, optimizer=80, activations=72, buffers=14 + 20)
    # Rank 1 in B0: one micro-batch, its backward's 10 + 12; held are its input, that of F1, whose receive is posted
    # before B0 starts, the gradient that the step before has sent last, and the targets, 2 x 3.
    assert last == MemoryParts(weights=40, gradients=40, optimizer=80, activations=52, buffers=6 + 30)


@pytest.mark.parametrize("microbatches", [2, 7])
def test_a_middle_stage_holds_no_batch_and_sends_one_gradient_while_it_makes_the_next(microbatches: int) -> None:
    (_, middle, _) = predicted("naive", 3, microbatches, model([layer()] * 3)).parts
    # In B0: what it saved and the backward's 12; held are its input, the gradient received, the gradient that the step
    # before has sent last, whose message may still be on its way, and the next input, whose receive is posted before.
    assert middle == MemoryParts(weights=40, gradients=40, optimizer=80, activations=42, buffers=40)


def test_the_optimizer_step_counts_its_temporaries_and_no_activation() -> None:
    (parts,) = predicted("1f1b", 1, 1, model([layer(largest_parameter_bytes=90)] * 2), temporaries=2).parts
    assert parts == MemoryParts(weights=80, gradients=80, optimizer=160 + 180, activations=0, buffers=10)
    assert OPTIMIZERS["adamw"].temporaries == 2
    assert OPTIMIZERS["sgd"].temporaries == 0


def test_gpipe_keeps_every_microbatch_and_1f1b_as_many_as_stages_follow() -> None:
    profile = model([layer()] * 4)
    gpipe, one_f_one_b = predicted("gpipe", 4, 8, profile), predicted("1f1b", 4, 8, profile)
    assert [p.activations for p in gpipe.parts] == [8 * 30 + 12] * 3 + [8 * 30 + 22]
    assert [p.activations for p in one_f_one_b.parts] == [4 * 30 + 12, 3 * 30 + 12, 2 * 30 + 12, 30 + 22]
    assert in_flight_microbatches(registry.build("gpipe", ranks=4, microbatches=8)) == (8,) * 4
    assert in_flight_microbatches(registry.build("1f1b", ranks=4, microbatches=8)) == (4, 3, 2, 1)


@pytest.mark.parametrize(("name", "in_flight"), [("gpipe", 8), ("1f1b", 4)])
def test_the_first_stage_holds_its_inputs_in_the_format_of_the_weights(name: str, in_flight: int) -> None:
    profile = model([layer()] * 4)
    plain, cast = predicted(name, 4, 8, profile), predicted(name, 4, 8, replace(profile, cast_bytes=5))
    assert cast.peak_bytes[0] == plain.peak_bytes[0] + 5 * in_flight
    assert cast.peak_bytes[1:] == plain.peak_bytes[1:]


def test_a_forward_makes_the_copy_of_its_input() -> None:
    profile = replace(model([layer(forward_transient_bytes=90)] * 2), cast_bytes=5)
    (parts,) = predicted("1f1b", 1, 1, profile).parts
    assert (parts.activations, parts.buffers) == (60 + 90, 10 + 5)


def test_stages_on_one_rank_hand_over_instead_of_receiving() -> None:
    one_rank = tuple(Action(op, stage, 0) for op, stage in ((Op.F, 0), (Op.F, 1), (Op.B, 1), (Op.B, 0)))
    schedule = Schedule("two chunks", ((0, 0),), (0,), (one_rank,), chunks=2)
    profile = model([layer()] * 2)
    figures = stage_figures(profile, uniform(2, 2))
    (parts,) = predict_memory(lower(schedule), profile, figures, MemoryNeeds(1, temporaries=0)).parts
    assert (parts.activations, parts.buffers) == (82, 10)  # as one stage of two layers, and the batch
    assert parts.weights == 80


def test_split_backward_keeps_what_was_saved_until_the_weight_gradient() -> None:
    actions = tuple(Action(op, 0, m) for op, m in ((Op.F, 0), (Op.I, 0), (Op.F, 1), (Op.I, 1), (Op.W, 0), (Op.W, 1)))
    schedule = Schedule("split", ((0,),), (0, 0), (actions,))
    profile = model([layer()])
    (parts,) = predict_memory(
        lower(schedule), profile, stage_figures(profile, ((0, 0),)), MemoryNeeds(2, temporaries=0)
    ).parts
    assert parts.activations == 2 * 30 + 40  # at W0, which makes a gradient of the weights


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_partition_bound_is_what_the_walk_finds_or_a_message_above(name: str, ranks: int) -> None:
    profile = model([layer(saved_bytes=30 + 7 * at, output_bytes=10 + at) for at in range(8)])
    schedule = registry.build(name, ranks=ranks, microbatches=6)
    peaks = predicted(name, ranks, 6, profile, temporaries=2).peak_bytes
    for stage, (first, last) in enumerate(uniform(8, ranks)):

        def fits(limit: int, stage: int = stage, first: int = first, last: int = last) -> bool:
            bound = StageMemoryLimit.of(profile, schedule, [limit] * schedule.ranks, MemoryNeeds(6, temporaries=2))
            return bound.fits(first, last, stage)

        boundary = 3 * (profile.layers[first].output_bytes + profile.layers[last].output_bytes)
        assert fits(peaks[stage] + boundary)
        assert not fits(peaks[stage] - boundary)


def test_one_microbatch_of_a_stage_keeps_its_input_besides() -> None:
    """Until its forward runs again, a micro-batch keeps what it has come as and what it has been sent on as."""
    profile = model([layer(output_bytes=50), layer(saved_bytes=30, output_bytes=10), layer(saved_bytes=8)])
    figures = stage_figures(profile, ((0, 0), (1, 1), (2, 2)))[1]
    one = bytes_of_one(figures)
    assert (one.saved, one.dropped) == (30 + 50, 10 + 50)


def test_hopeless_is_never_said_of_what_fits() -> None:
    profile = model([layer(saved_bytes=5 * at) for at in range(6)])
    schedule = registry.build("1f1b", ranks=2, microbatches=4)
    for limit in range(300, 1500, 20):
        bound = StageMemoryLimit.of(profile, schedule, [limit] * schedule.ranks, MemoryNeeds(4, temporaries=2))
        for first in range(6):
            for last in range(first, 6):
                assert not (bound.fits(first, last, 0) and bound.hopeless(first, last, 0))


def test_a_weight_of_two_layers_is_held_once_by_a_rank_and_once_by_each_of_two() -> None:
    shared = (SharedWeight((0, 3), weight_bytes=40, gradient_bytes=40),)
    profile = model([layer()] * 4, shared=shared)
    figures = stage_figures(profile, uniform(4, 4))
    for placement, weights in (((0, 1, 1, 0), [40, 80]), ((0, 1, 0, 1), [80, 80])):
        schedule = in_order(placement, 2)
        parts = predict_memory(lower(schedule), profile, figures, MemoryNeeds(2, temporaries=0)).parts
        assert [part.weights for part in parts] == weights
        assert [part.gradients for part in parts] == weights
        assert [part.optimizer for part in parts] == [2 * each for each in weights]


def test_states_that_replicas_share_out_are_rounded_up() -> None:
    """Of 20 elements of 4 bytes each of three replicas has 7, with two states each; the flat weights have 21."""
    profile = model([layer(saved_bytes=100)] * 2)
    program = lower(registry.build("1f1b", ranks=1, microbatches=1))
    needs = MemoryNeeds(1, temporaries=0, states_over=3)
    (parts,) = predict_memory(program, profile, stage_figures(profile, ((0, 1),)), needs).parts
    assert (parts.optimizer, parts.weights) == (56, 84)


def test_a_split_backward_leaves_what_the_profile_says() -> None:
    """A layer leaves 36 to W, of its input 10, and the whole gradient of its output, 10."""
    split = SplitBackward(deferred_bytes=36, input_bytes=10, gradient_bytes=10, transient_bytes=12)
    profile = model([layer(split=split)] * 4)
    (figures,) = stage_figures(profile, ((0, 3),))
    assert figures.deferred_bytes == 4 * (36 + 10) + 3 * 10
    # In the first layer's I: its own 30, its output's gradient and its 12; of the second 46 (its input is the first's
    # output, still counted there), of the third and fourth 56 each. The loss holds nothing.
    assert figures.input_backward_peak_bytes == 30 + 10 + 12 + 46 + 2 * 56 - 4 * 30


def test_gradients_that_i_makes_wait_until_the_whole_stage_has_run() -> None:
    """Of biases and norms, 3 bytes in each layer: those of the later layers are alive in the first layer's I."""
    split = SplitBackward(deferred_bytes=36, input_bytes=10, gradient_bytes=10, transient_bytes=12)
    profiles = (model([layer(split=replace(split, waiting_bytes=each))] * 4) for each in (0, 3))
    without, found = (stage_figures(profile, ((0, 3),))[0] for profile in profiles)
    assert found.input_backward_peak_bytes == without.input_backward_peak_bytes + 3 * 3
    assert found.deferred_bytes == without.deferred_bytes
