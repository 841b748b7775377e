"""Segments of a policy, and the rows that they make of a profile: arithmetic, no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from plan_profiles import layer, loss_layer, model
from programs import chains

from runner.memory.solve.adjust import adjusted, host_bytes
from runner.memory.solve.policies import solve
from runner.memory.solve.values import ActivationPlan, ChainProgram, PolicyOptions, Segment
from runner.plan.stages.figures import StageFigures, stage_figures
from runner.plan.stages.scale import for_samples
from runner.profile import BoundaryTensor, ModelProfile, Recomputation, profile_from_json

KNOWN: dict[str, Any] = {"saves_input": True, "saves_output": False, "unsaved_forward_bytes": 14}
AGAIN = {"": Recomputation(0, 20, 100.0), "matmuls": Recomputation(8, 12, 25.0)}


def chain(count: int = 4) -> ModelProfile:
    """30 bytes saved of which 10 are the output, which the layer itself does not save."""
    return model([replace(layer(**KNOWN, recomputation=AGAIN), name=f"block{i}") for i in range(count)])


def segments(options: PolicyOptions, partition: tuple[tuple[int, int], ...] = ((0, 3),)) -> tuple[ChainProgram, ...]:
    return chains(solve(chain(), partition, options))


def test_policies_make_their_segments() -> None:
    assert segments(PolicyOptions()) == ((Segment(0, 3),),)
    assert segments(PolicyOptions("full")) == (tuple(Segment(i, i, True) for i in range(4)),)
    assert segments(PolicyOptions("periodic", every=3)) == ((Segment(0, 2, True), Segment(3, 3, True)),)
    kept = tuple(Segment(i, i, True, "matmuls") for i in range(4))
    assert segments(PolicyOptions("selective", save_ops="matmuls")) == (kept,)
    manual = segments(PolicyOptions("manual", layers=("block2", "0")))[0]
    assert [each.recompute for each in manual] == [True, False, True, False]


def test_segments_end_where_stages_end() -> None:
    stages = segments(PolicyOptions("periodic", every=2), ((0, 2), (3, 3)))
    assert stages == ((Segment(0, 1, True), Segment(2, 2, True)), (Segment(3, 3, True),))


def test_a_name_wins_over_an_index() -> None:
    profile = model([replace(layer(), name=name) for name in ("1", "0", "x")])
    (stage,) = chains(solve(profile, [(0, 2)], PolicyOptions("manual", layers=("0", "2"))))
    assert [each.recompute for each in stage] == [False, True, True]


def figures(options: PolicyOptions, partition: tuple[tuple[int, int], ...] = ((0, 3),)) -> tuple[StageFigures, ...]:
    profile = chain()
    return stage_figures(adjusted(profile, solve(profile, partition, options)), partition)


def test_full_keeps_inputs_and_pays_one_forward() -> None:
    (plain,), (full,) = figures(PolicyOptions()), figures(PolicyOptions("full"))
    assert plain.saved_bytes == 4 * 30
    assert full.saved_bytes == 4 * 10
    assert full.forward_seconds == plain.forward_seconds == 4.0
    assert full.backward_seconds == plain.backward_seconds + 4.0
    rows = adjusted(chain(), solve(chain(), [(0, 3)], PolicyOptions("full"))).layers
    assert [row.backward_flops for row in rows] == [200.0 + 100.0] * 4


def test_the_backward_of_a_recomputed_stage_holds_one_segment_at_a_time() -> None:
    first, _ = figures(PolicyOptions("full"), ((0, 1), (2, 3)))
    # Its last layer: a whole second forward saves 30 bytes and has 5 more while it runs, above the two outputs kept.
    assert first.backward_peak_bytes == 30 + 5
    both, _ = figures(PolicyOptions("periodic", every=2), ((0, 1), (2, 3)))
    assert both.saved_bytes == 10
    assert both.backward_peak_bytes == (20 + 10) + 30 + 5  # the tensor between its layers is made again too


def test_selective_keeps_what_it_chose_and_computes_the_rest() -> None:
    (full,), (selective,) = figures(PolicyOptions("full")), figures(PolicyOptions("selective", save_ops="matmuls"))
    assert selective.saved_bytes == full.saved_bytes + 4 * 8
    assert selective.backward_seconds == pytest.approx(4 * (2.0 + 0.25))


def test_an_output_that_nobody_keeps_does_not_count() -> None:
    layers = [layer(**KNOWN), layer(**(KNOWN | {"saves_input": False}))]
    profile = model(layers, loss=loss_layer(saves_input=False))
    plain = adjusted(profile, ActivationPlan(((Segment(0, 1),),)))
    assert [row.saved_bytes for row in plain.layers] == [20, 20]
    assert plain.layers[1].forward_transient_bytes == 5 + 10 + 10  # both outputs are there while it runs


def test_profiles_without_knowledge_stay_as_they_are() -> None:
    profile = model([layer()] * 3)
    assert adjusted(profile, solve(profile, [(0, 2)], PolicyOptions())) == profile


SKIP, BATCH = BoundaryTensor(0, 10), BoundaryTensor(9, 0)


def carrying() -> ModelProfile:
    """The first layer makes a skip tensor of 10 that the last one saves; each makes one of 10 for the next to save."""
    made = [BoundaryTensor(number, 10) for number in (1, 2, 3, 4)]
    outputs = [(SKIP, made[0], BATCH), (SKIP, made[1], BATCH), (SKIP, made[2]), (made[3],)]
    saves = [(9,), (1,), (2,), (0, 3)]
    fresh = [40, 30, 30, 30]  # saved bytes: 20 inside of each, and what it makes
    return model(
        [
            layer(
                saved_bytes=num_bytes, output_bytes=10 * len(output), output=output, saves=kept,
                output_gradient_bytes=10 * len(output),
            )
            for output, kept, num_bytes in zip(outputs, saves, fresh, strict=True)
        ],
        loss=loss_layer(output=(BoundaryTensor(5, 0),), saves=(4,)),
    )  # fmt: skip


def test_a_tensor_that_layers_carry_through_counts_once() -> None:
    profile = carrying()
    rows = adjusted(profile, ActivationPlan(((Segment(0, 3),),)))
    assert [row.saved_bytes for row in rows.layers] == [20, 30, 30, 40]  # each its input, the last one the skip besides
    assert rows.loss.saved_bytes == 10
    assert [row.saved_bytes + row.forward_transient_bytes for row in rows.layers] == [45, 55, 55, 55]
    halves = [(0, 1), (2, 3)]
    first, second = stage_figures(adjusted(profile, solve(profile, halves, PolicyOptions())), halves)
    assert first.saved_bytes == 40 + 10 + 20  # inside, the tensor between, and its output of two
    assert second.saved_bytes == 40 + 10 + 10  # what it was given is its caller's


def test_segments_that_are_computed_again_share_what_they_are_given() -> None:
    profile = carrying()
    (stage,) = stage_figures(adjusted(profile, solve(profile, [(0, 3)], PolicyOptions("full"))), [(0, 3)])
    assert stage.saved_bytes == 10 + 3 * 10 + 10  # the skip, three inputs, the loss's


def test_a_tensor_that_nothing_keeps_counts_where_it_is_alive() -> None:
    given, handed = BoundaryTensor(1, 10), BoundaryTensor(2, 10)
    layers = [layer(output=(given,)), layer(output=(handed,)), layer(output=(BoundaryTensor(3, 10),))]
    rows = adjusted(model(layers), ActivationPlan(((Segment(0, 2),),))).layers
    assert [row.saved_bytes for row in rows] == [20, 20, 20]
    assert [row.forward_transient_bytes for row in rows] == [15, 25, 25]


def test_on_an_accelerator_saved_tensors_leave() -> None:
    profile = chain()
    moved = solve(profile, [(0, 3)], PolicyOptions(), to_host=True)
    (stage,) = stage_figures(adjusted(profile, moved), [(0, 3)])
    assert stage.saved_bytes == 10  # the loss saves its input, which is the last output
    assert host_bytes(profile, moved.stages[0]) == 4 * 20
    inputs = solve(profile, [(0, 3)], PolicyOptions("full"), to_host=True)
    assert host_bytes(profile, inputs.stages[0]) == profile.input_bytes + 3 * 10


def test_profiles_keep_what_was_scanned_through_json_and_scaling() -> None:
    assert profile_from_json(carrying().to_json()) == carrying()
    assert for_samples(carrying(), 2).layers[0].output[:2] == (BoundaryTensor(0, 20), BoundaryTensor(1, 20))
    profile = chain()
    assert profile_from_json(profile.to_json()) == profile
    doubled = for_samples(profile, 2).layers[0]
    assert doubled.unsaved_forward_bytes == 28
    assert doubled.recomputation["matmuls"] == Recomputation(16, 24, 50.0)


def test_solving_imports_no_torch() -> None:
    code = "import sys, runner.memory.solve.policies, runner.memory.solve.adjust\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
