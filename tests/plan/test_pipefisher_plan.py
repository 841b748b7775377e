"""The plan of K-FAC's work in bubbles: seconds and bytes that it is made from, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from plan_profiles import layer, model
from test_make import planned, request

from runner.plan.make import plan_problems
from runner.plan.render import to_table
from runner.plan.stages.scale import for_samples
from runner.plan.time.estimate import with_estimated_seconds
from runner.profile import FillProfile, ModelProfile, profile_from_json
from runner.schedule.catalogue import registry
from runner.schedule.simulation.clock import StageCosts, simulate

ASKED: dict[str, Any] = {
    "schedule__name": "pipefisher",
    "optimizer__name": "kfac",
    "parallelism__pipeline": 4,
    "schedule__microbatches": 4,
    "data__batch_size": 4,
}


def fills(sums: float, inversions: float, kept: int = 0) -> tuple[FillProfile, ...]:
    """Of factors of 5 x 5, to which a micro-batch adds 8 rows."""
    of_sums = [FillProfile(kind, True, 8, 5, 2.0 * 8 * 25, kept, seconds=sums) for kind in ("CURV_A", "CURV_B")]
    temporaries = 2 * 4 * 25
    of_inversions = [
        FillProfile(kind, False, 8, 5, 125.0, peak_bytes=temporaries, seconds=inversions) for kind in ("INV_A", "INV_B")
    ]
    return (*of_sums, *of_inversions)


def profile(sums: float = 0.5, inversions: float = 1.5, kept: int = 0) -> ModelProfile:
    """The example's costs: a forward of 1, a backward of 2, 7 of K-FAC's on each of four ranks."""
    return model([layer(fills=fills(sums, inversions, kept))] * 4)


def test_the_example_of_four_ranks() -> None:
    plan = planned(profile(), **ASKED)
    assert plan.schedule.windows == 2
    assert plan.time.step_seconds == 21
    assert plan.time.bubble_ratio == pytest.approx(1 - 31 / 42)
    assert plan.time.busy_seconds == pytest.approx((15.5,) * 4)
    document = plan.to_json()
    assert document["refresh_interval"] == 2
    assert document["utilisation"] == {"with_curvature": pytest.approx(31 / 42), "without": pytest.approx(12 / 21)}
    said = " ".join(to_table(plan).split())
    assert "schedule pipefisher, 4 micro-batches of up to 1 sample 40 parameters" in said
    assert "new inverses every 2 steps; ranks are busy 73.8% of the time with K-FAC's work, 57.1% without" in said
    assert "refresh_interval" not in planned(profile(), **ASKED | {"schedule__name": "1f1b"}).to_json()


def test_places_follow_the_profiles_seconds_and_cost_where_it_is_set() -> None:
    plan = planned(profile(sums=0.9, inversions=0.1), **ASKED)
    of_kinds = {"CURV_A": [0.9] * 4, "CURV_B": [0.9] * 4, "INV_A": [0.1] * 4, "INV_B": [0.1] * 4}
    costs = StageCosts(F=[1] * 4, B=[2] * 4, fills=of_kinds)
    expected = registry.build("pipefisher", ranks=4, microbatches=4, costs=costs)
    of_unit_costs = registry.build("pipefisher", ranks=4, microbatches=4)
    assert plan.schedule.actions == expected.actions != of_unit_costs.actions
    by_cost = planned(profile(sums=0.9, inversions=0.1), **ASKED, cost__comm=1e-9)
    assert by_cost.schedule.actions == of_unit_costs.actions


def test_what_no_bubble_has_room_for_makes_the_step_longer() -> None:
    plan = planned(profile(inversions=50.0), **ASKED)
    played = simulate(plan.schedule, plan.time.costs)
    assert plan.time.step_seconds == pytest.approx(played.makespan / plan.schedule.windows)
    assert plan.time.step_seconds > 21 + 50 / plan.schedule.windows


def test_figures_go_with_the_samples_but_for_the_inversions() -> None:
    sums, _, inversions, _ = for_samples(profile(kept=10), 3).layers[0].fills
    assert (sums.rows, sums.kept_bytes, sums.seconds, inversions.seconds) == (24, 30, 1.5, 1.5)
    hardware = request().hardware
    hardware.flops = {"fp32": 1e3}
    estimated = with_estimated_seconds(profile(), hardware, "fp32", efficiency=1.0).layers[0].fills
    assert estimated[1].seconds == pytest.approx(2 * 8 * 25 / 1e3)
    assert estimated[3].seconds == pytest.approx(125 / 1e3)
    assert profile_from_json(profile(kept=10).to_json()) == profile(kept=10)


def test_memory_of_what_waits() -> None:
    """Rank 3 sums all after its backwards, each of which leaves 100 of inputs and 100 of gradients to wait."""
    kept = planned(profile(kept=100), **ASKED).memory.parts[3]
    none = planned(profile(), **ASKED).memory.parts[3]
    # Before the fourth backward three micro-batches wait, 600; in it the layer's 30 and 12 more; its 200 come after.
    assert kept.activations == max(600 + 30 + 12, 800)
    assert none.activations == max(30 + 12, 2 * 4 * 25)  # temporaries of an inversion of a factor of 5 x 5


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        ({"optimizer__name": "adamw"}, "optimizer.name", "must be kfac with schedule=pipefisher"),
        ({"optimizer__refresh_every": 10}, "optimizer.refresh_every", "must be null with schedule=pipefisher"),
        ({"schedule__base": "chimera"}, "schedule.base", "must be one of 1f1b, gpipe"),
        ({"schedule__base": "zb_h1"}, "schedule.base", "must be one of 1f1b, gpipe"),
        ({"parallelism__pipeline": 1}, "parallelism.pipeline", "must be at least 2 for schedule=pipefisher"),
        ({"schedule__name": "1f1b", "schedule__base": "gpipe"}, "schedule.base", "applies to schedule=pipefisher only"),
    ],
)
def test_refused_with_the_fix(changes: dict[str, Any], path: str, says: str) -> None:
    (problem,) = plan_problems(request(**ASKED | changes), 4)
    assert problem.path == path
    assert says in problem.rule
    assert problem.why
    assert problem.fix
    assert plan_problems(request(**ASKED), 4) == []
