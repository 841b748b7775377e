"""A step's seconds are the end of the played program: what ranks lend each other and what links carry counts."""

from __future__ import annotations

import pytest
from plan_profiles import layer, model

from runner.plan.cut.partition import uniform
from runner.plan.stages.figures import stage_figures
from runner.plan.time.played import measured_time
from runner.plan.time.predict import predict_time, stage_costs
from runner.plan.values import Link, StageSeconds, TimePrediction
from runner.profile import ModelProfile
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import simulate


def predicted(name: str, profile: ModelProfile, link: Link, post_validation: bool = False) -> TimePrediction:
    program = lower(build(name, ranks=4, microbatches=8))
    figures = stage_figures(profile, uniform(len(profile.layers), 4))
    return predict_time(program, profile, figures, mean_samples=1.0, link=link, post_validation=post_validation)


def test_what_a_stage_keeps_takes_its_bytes_to_move() -> None:
    profile = model([layer(saved_bytes=30, output_bytes=10)] * 4)
    figures = stage_figures(profile, uniform(4, 4))
    costs = stage_costs(profile, figures, mean_samples=2.0, copies=(1,) * 4, link=Link(0.5, 20.0))
    assert costs.stash == [0.5 + 2 * 30 / 20, *[0.5 + 2 * (30 + 10) / 20] * 3]
    assert (costs.comm, costs.occupancy) == ([0.5 + 1.0] * 3, [1.0] * 3)


def test_bpipe_pays_for_what_it_moves() -> None:
    """In proportion to the bytes. Where links are free, it is as long as 1f1b."""
    seconds = []
    for saved in (30, 60, 120):
        profile = model([layer(saved_bytes=saved, output_bytes=0)] * 4)
        assert predicted("bpipe", profile, Link()).step_seconds == predicted("1f1b", profile, Link()).step_seconds == 33
        seconds.append(predicted("bpipe", profile, Link(0.0, 1000.0)).step_seconds)
    assert 33 < seconds[0] < seconds[1] < seconds[2]
    assert seconds[2] - 33 == pytest.approx(4 * (seconds[0] - 33))


def test_a_slow_link_carries_one_message_after_the_other() -> None:
    """Messages of 4 seconds pass every 4 seconds, although a forward takes 1: the last of 8 is there at 1 + 8 x 4."""
    profile = model([layer(output_bytes=40)] * 2)
    program = lower(build("gpipe", ranks=2, microbatches=8))
    figures = stage_figures(profile, uniform(2, 2))
    time = predict_time(program, profile, figures, mean_samples=1.0, link=Link(0.0, 10.0))
    # All forwards have come at 33, the last of them has run at 34; backwards of 2 send a gradient of 4 every 4 seconds.
    assert time.step_seconds == 34 + 2 + 8 * 4 + 2


def test_post_validation_plays_the_steps_between_the_windows() -> None:
    """Equal steps make each window so much longer, and the bubble is that of forwards and backwards alone."""
    equal = model([layer()] * 4, optimizer_seconds_per_byte=0.01)
    time = predicted("zb_h1", equal, Link(), post_validation=True)
    free = predicted("zb_h1", model([layer()] * 4), Link(), post_validation=True)
    assert time.step_seconds == pytest.approx(free.step_seconds + 0.4)
    assert time.bubble_ratio == free.bubble_ratio


def test_a_streams_steps_and_reductions_stand_between_its_windows() -> None:
    program = lower(build("pipefisher", ranks=4, microbatches=4))
    profile = model([layer()] * 4, optimizer_seconds_per_byte=0.01)
    figures = stage_figures(profile, uniform(4, 4))
    time = predict_time(program, profile, figures, mean_samples=1.0, data=2, link=Link(0.1, None))
    played = simulate(program, time.costs)
    assert time.step_seconds == played.makespan / program.schedule.windows


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "pipedream", "chimera", "bpipe"])
def test_stages_that_take_what_was_planned_give_the_planned_step(name: str, post_validation: bool) -> None:
    profile = model([layer(saved_bytes=30, forward_seconds=one) for one in (1.0, 1.5, 2.0, 1.25)])
    program, planned = lower(build(name, ranks=4, microbatches=8)), predicted(name, profile, Link(), post_validation)
    costs = planned.costs
    F, B, I, W, step = (tuple(each) for each in (costs.F, costs.B, costs.I, costs.W, costs.step))  # noqa: E741, N806
    seconds = StageSeconds(F, B, step, input_gradient=I, weight_gradient=W)
    again = measured_time(program, costs, seconds, post_validation=post_validation)
    assert (again.step_seconds, again.busy_seconds) == (planned.step_seconds, planned.busy_seconds)
    assert again.source == "measured"
