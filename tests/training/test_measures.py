"""Where the seconds of a step went."""

from __future__ import annotations

import pytest

from runner.engine.measure.timeline import StepTimes
from runner.training.measure.measures import RankMeasures, bubble_ratio, seconds_of_median_step, steady_bubble_ratio


def test_waiting_at_step_for_a_later_rank_is_bubble_and_the_exchange_itself_is_not() -> None:
    early = StepTimes(0, 0.0, 10.0, compute=4.0, waiting=1.0, optimizer=1.0, waited_at_step=3.5, messages=0.1)
    late = StepTimes(0, 0.0, 10.0, compute=7.0, waiting=1.0, optimizer=1.0, waited_at_step=0.5, messages=0.3)
    ranks = [RankMeasures((times,), {}, 0, 0, {}, loads=(0.2,), calls=(0.1,)) for times in (early, late)]
    parts = seconds_of_median_step(ranks, [0], {0: 10.5})
    assert parts is not None
    assert parts["bubble"] == pytest.approx((1.0 + 3.0 + 1.0) / 2)
    assert parts["communication"] == pytest.approx(0.5 + 0.2), "the later rank's exchange, and starting messages"
    assert (parts["data"], parts["callbacks"]) == pytest.approx((0.2, 0.1))
    assert parts["rest"] == pytest.approx(10.5 - 5.5 - 2.5 - 1.0 - 0.7 - 0.2 - 0.1)
    assert sum(parts.values()) == pytest.approx(10.5)


def test_ranks_that_are_skewed_share_out_their_own_time() -> None:
    """The first rank's step takes 10 s, the second's 20 s: half of each is compute, and so is half of the step."""
    steps = [StepTimes(0, compute=5.0), StepTimes(0, compute=10.0)]
    ranks = [
        RankMeasures((times,), {}, 0, 0, {}, walls=(wall,)) for times, wall in zip(steps, (10.0, 20.0), strict=True)
    ]
    parts = seconds_of_median_step(ranks, [0], {0: 10.0})
    assert parts is not None
    assert {part: seconds for part, seconds in parts.items() if seconds} == {"compute": 5.0, "rest": 5.0}
    assert RankMeasures.of_plain(ranks[1].to_plain()) == ranks[1]


def test_a_bubble_is_that_of_an_interval_where_its_steps_are_not_alike() -> None:
    """Steps of 10 s: 9 s of compute, then 5 s; of two ranks the second does nothing."""
    busy = [StepTimes(step, first_compute=0.0, last_compute=10.0, compute=9.0 - 4.0 * (step % 2)) for step in range(5)]
    idle = [StepTimes(step, first_compute=0.0, last_compute=10.0) for step in range(5)]
    ranks = [RankMeasures(tuple(steps), {}, 0, 0, {}) for steps in (busy, idle)]
    assert bubble_ratio(ranks, range(5)) == pytest.approx(1 - 9 / 20)
    assert bubble_ratio(ranks, range(5), interval=2) == pytest.approx(1 - 14 / 40)
    assert bubble_ratio(ranks, range(1), interval=2) == pytest.approx(1 - 9 / 20)
    assert bubble_ratio(ranks, [], interval=2) is None


def test_the_bubble_of_windows_that_overlap_is_that_of_each_ranks_own_time() -> None:
    """Two ranks, skewed by half a step: each computes 3 of 4 seconds from one batch to the next."""
    ranks = [
        RankMeasures(
            tuple(
                StepTimes(step, first_compute=4.0 * step + skew, last_compute=4.0 * step + skew + 3.5, compute=3.0)
                for step in range(4)
            ),
            {}, 0, 0, {},
        )
        for skew in (0.0, 2.0)
    ]  # fmt: skip
    assert steady_bubble_ratio(ranks, range(4)) == pytest.approx(0.25)
    assert steady_bubble_ratio(ranks, range(3, 4)) is None, "nothing follows the last one"
