"""A step's seconds are the end of the played program: what ranks lend each other and what links carry counts."""

from __future__ import annotations

import pytest
from plan_profiles import layer, model

from runner.plan.cut.partition import uniform
from runner.plan.stages.figures import stage_figures
from runner.plan.time.played import measured_time
from runner.plan.time.predict import predict_time
from runner.plan.values import Link, StageSeconds, TimePrediction
from runner.profile import ModelProfile
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower


def predicted(name: str, profile: ModelProfile, link: Link, post_validation: bool = False) -> TimePrediction:
    program = lower(build(name, ranks=4, microbatches=8))
    figures = stage_figures(profile, uniform(len(profile.layers), 4))
    return predict_time(program, profile, figures, mean_samples=1.0, link=link, post_validation=post_validation)


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
