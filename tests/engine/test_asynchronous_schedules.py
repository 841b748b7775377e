"""Schedules whose stages read different versions of their weights, against their recurrences in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from late_weights import ADAM, MOMENTUM, SGD, Optimizer, as_forward, make_batches, newest, recurrence, train

from runner.schedule import build


def lags_of(name: str, ranks: int, count: int) -> list[int]:
    """How many micro-batches earlier the newest gradient is that a stage's forward knows, as the papers say it."""
    return {
        "ampnet": [ranks - 1 - stage for stage in range(ranks)],
        "pipedream": [ranks - 1 - stage for stage in range(ranks)],
        "pipedream_vsync": [ranks - 1] * ranks,
        "pipedream_2bw": [count] * ranks,
        "wpipe": [count] * ranks + [0] * ranks,
    }[name]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "ranks", "count", "optimizer"),
    [
        ("ampnet", 4, 1, ADAM), ("ampnet", 3, 5, SGD), ("pipedream", 4, 2, MOMENTUM), ("pipedream", 3, 5, ADAM),
        ("pipedream_vsync", 4, 1, SGD), ("pipedream_vsync", 3, 5, ADAM), ("pipedream_2bw", 2, 1, SGD),
        ("pipedream_2bw", 4, 6, ADAM), ("pipedream_2bw", 4, 3, MOMENTUM), ("wpipe", 2, 3, ADAM), ("wpipe", 4, 6, SGD),
    ],
)  # fmt: skip
def test_a_schedule_is_its_recurrence(name: str, ranks: int, count: int, optimizer: Optimizer) -> None:
    schedule = build(name, ranks=ranks, microbatches=count)
    lags, batches = lags_of(name, ranks, count), make_batches(2 * count)
    found = train(batches, schedule, count=count, optimizer=optimizer)
    gaps = newest if name == "ampnet" else as_forward
    options: dict[str, Any] = {"layers": schedule.stages, "count": count, "optimizer": optimizer}
    found.assert_equals(recurrence(batches, lags, **options, gaps=gaps))
    assert [found.held[stage] for stage in sorted(found.held)] == [
        1 if name == "ampnet" else 1 - (-lag // count) for lag in lags
    ]
    if name == "pipedream_2bw":
        last = len(batches)
        assert set(found.left.values()) == {(last - 1, last)}, "the newest, and the one that the next window would read"


@pytest.mark.parametrize("name", ["ampnet", "pipedream", "pipedream_vsync", "pipedream_2bw", "wpipe"])
def test_the_recurrences_differ(name: str) -> None:
    """The oracle would be of no use if other lags gave the same bits."""
    lags = lags_of(name, ranks=3, count=4)
    options: dict[str, Any] = {"layers": len(lags), "count": 4, "optimizer": SGD}
    cases = ((lags, as_forward), (lags, newest), ([0] * len(lags), as_forward))
    found = [recurrence(make_batches(4, steps=4), each, **options, gaps=gaps)[0][-1] for each, gaps in cases]
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("name", "drained_after"),
    [
        ("pipedream", (0, 2, 3)),
        ("pipedream_vsync", (2, 5)),
        ("wpipe", (0, 3)),
        ("pipedream_2bw", (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_draining_changes_no_bit_where_older_versions_are_kept(name: str, drained_after: Sequence[int]) -> None:
    """What is read is a matter of the step's number alone, whatever is drained in between."""
    schedule, batches = build(name, ranks=3, microbatches=4), make_batches(9)
    options: dict[str, Any] = {"count": 4, "optimizer": MOMENTUM}
    whole = train(batches, schedule, **options)
    train(batches, schedule, **options, drained_after=drained_after).assert_equals((whole.losses[0], whole.weights))


def test_without_older_versions_a_drained_pipeline_begins_anew() -> None:
    """Both halves are runs of their own: the second begins with the weights of the first, and no forward is behind."""
    schedule, cut = build("ampnet", ranks=3, microbatches=1), 5
    batches = make_batches(4, steps=10)
    options: dict[str, Any] = {"count": 1, "optimizer": SGD}
    drained = train(batches, schedule, **options, drained_after=(cut - 1,)).losses[0]
    first, _ = recurrence(batches[:cut], lags_of("ampnet", 3, 1), layers=3, **options, gaps=newest)
    assert drained[:cut] == first
    whole = train(batches, schedule, **options).losses[0]
    assert whole[:cut] == first
    assert whole != drained
