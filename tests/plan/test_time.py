from __future__ import annotations

from typing import Any

import pytest
from plan_profiles import layer, loss_layer, model

from runner.config.schema import HardwareConfig
from runner.errors import RequestError
from runner.plan.cut.partition import uniform
from runner.plan.stages.figures import stage_figures
from runner.plan.time.estimate import EFFICIENCY, with_estimated_seconds
from runner.plan.time.played import measured_time
from runner.plan.time.predict import predict_time, ring_all_reduce_seconds
from runner.plan.values import Link, StageSeconds, TimePrediction
from runner.profile import ModelProfile
from runner.schedule.catalogue import registry
from runner.schedule.lowering.program import lower


def predicted(name: str, ranks: int, microbatches: int, profile: ModelProfile, **options: object) -> TimePrediction:
    schedule = registry.build(name, ranks=ranks, microbatches=microbatches)
    figures = stage_figures(profile, uniform(len(profile.layers), ranks))
    given: dict[str, Any] = {"mean_samples": float(profile.samples)} | options
    return predict_time(lower(schedule), profile, figures, **given)


def measured(name: str, seconds: StageSeconds) -> TimePrediction:
    """The time of two measured stages with one micro-batch, whose layers were estimated."""
    costs = predicted(name, 2, 1, model([layer()] * 2, seconds_source="estimated")).costs
    return measured_time(lower(registry.build(name, ranks=2, microbatches=1)), costs, seconds)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 5), (2, 1), (3, 4), (4, 4), (4, 16)])
def test_equal_stages_take_t_plus_d_minus_one_rounds(name: str, ranks: int, microbatches: int) -> None:
    time = predicted(name, ranks, microbatches, model([layer()] * ranks))
    assert time.step_seconds == pytest.approx((microbatches + ranks - 1) * (1 + 2))
    assert time.bubble_ratio == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert time.busy_seconds == pytest.approx((microbatches * 3,) * ranks)
    assert time.source == "measured"


def test_samples_loss_step_and_reduction_count() -> None:
    profile = model(
        [layer()], samples=4, loss=loss_layer(forward_seconds=0.5, backward_seconds=0.5), optimizer_seconds_per_byte=0.1
    )
    # Two micro-batches of 2 samples: half of 3 + 1 each; a step over 40 bytes; four messages of 40 / 3 bytes at 2 B/s.
    time = predicted("1f1b", 1, 2, profile, mean_samples=2.0, data=3, link=Link(0.25, 2.0))
    assert time.step_seconds == pytest.approx(4 + 4 * (0.25 + 40 / 3 / 2) + 4)
    assert time.bubble_ratio == pytest.approx(0)
    assert ring_all_reduce_seconds(40, 1, Link(0.25, 2.0)) == 0


def test_measured_stages_win_over_layers() -> None:
    seconds = StageSeconds(forward=(1.0, 2.0), backward=(3.0, 4.0), step=(0.5, 0.25), message=0.125)
    time = measured("gpipe", seconds)
    assert time.step_seconds == pytest.approx(1 + 0.125 + 2 + 4 + 0.125 + 3 + 0.5)
    assert time.source == "measured"


def test_a_rehearsed_window_says_what_its_parts_do_not() -> None:
    """The played window takes 1 + 2 + 4 + 3 s; one that took 12 s adds 2 s to the step, a shorter one adds nothing."""
    for window, more in ((12.0, 2.0), (9.0, 0.0), (None, 0.0)):
        seconds = StageSeconds(forward=(1.0, 2.0), backward=(3.0, 4.0), step=(0.5, 0.25), window=window)
        time = measured("gpipe", seconds)
        assert time.step_seconds == pytest.approx(10.5 + more)
        assert time.bubble_ratio == pytest.approx(0.5)


def test_measured_parts_of_a_split_backward_win_over_halves() -> None:
    seconds = StageSeconds(
        forward=(1.0, 2.0),
        backward=(0.0, 0.0),
        input_gradient=(1.5, 2.0),
        weight_gradient=(1.0, 3.0),
        step=(0.5, 0.25),
        message=0.125,
    )
    time = measured("zb_h1", seconds)
    first, last = 1 + 0.125 + 2 + 2 + 0.125 + 1.5 + 1 + 0.5, 1 + 0.125 + 2 + 2 + 3 + 0.25
    assert time.step_seconds == pytest.approx(max(first, last))


def test_estimated_seconds_are_flops_over_the_reached_rate() -> None:
    hardware = HardwareConfig(name="made_up", flops={"fp32": 100.0, "bf16": 1000.0})
    profile = with_estimated_seconds(model([layer()]), hardware, "bf16")
    assert profile.seconds_source == "estimated"
    assert profile.layers[0].forward_seconds == pytest.approx(100.0 / (1000.0 * EFFICIENCY))
    assert profile.layers[0].backward_seconds == pytest.approx(200.0 / (1000.0 * EFFICIENCY))
    assert profile.optimizer_seconds_per_byte > 0


def test_hardware_without_the_precision_is_refused() -> None:
    hardware = HardwareConfig(name="made_up", flops={"fp32": 100.0})
    with pytest.raises(RequestError, match=r"hardware = made_up: states no FLOP/s for precision bf16 \(stated: fp32\)"):
        with_estimated_seconds(model([layer()]), hardware, "bf16")


def test_an_injected_link_is_passed_before_the_machine_s() -> None:
    link = Link(1.0, 100.0).slowed(0.5, 50.0)
    assert link.seconds(100) == pytest.approx(1.0 + 1.0 + 0.5 + 2.0)
    assert Link().slowed(0.25, None) == Link(0.25, None)
    assert Link(0.0, 10.0).slowed(0.0, None) == Link(0.0, 10.0)
