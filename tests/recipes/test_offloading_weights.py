"""The recipe of weights in the host's memory: counted bytes are the planned ones, and the largest width is found."""

from __future__ import annotations

import pytest

from runner.recipes.offloading.weights import largest_width, sizes, strategies

SMALL = (
    "model=mlp", "model.kwargs.layers=4", "model.kwargs.width=64", "data.batch_size=8", "schedule.microbatches=2",
    "device=cpu", "logger=none",
)  # fmt: skip
MOVED = ("offload=weights_granular", "offload.fraction=1.0")


@pytest.mark.parametrize("most", range(0, 100, 7))
def test_the_largest_width_is_that_of_trying_all(most: int) -> None:
    asked = []

    def fits(width: int) -> bool:
        asked.append(width)
        return width <= most

    assert largest_width(fits, 8) == max((width for width in range(8, 200, 8) if width <= most), default=0)
    assert len(asked) < 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_counted_bytes_are_those_predicted() -> None:
    none, slow, fast = strategies([1e8, 1e10], 0, {"none": (), "all": MOVED}, SMALL)
    assert none["link"] is None
    assert none["counted_moved"] == none["predicted_moved"] == 0
    for row in (slow, fast):
        assert row["counted_moved"] == row["predicted_moved"] > 0
        assert row["predicted_bytes"] - 256 <= row["counted_bytes"] * 1.03
        assert row["counted_bytes"] <= row["predicted_bytes"] + 256  # losses and their weights
        assert row["counted_bytes"] < none["counted_bytes"]
    assert slow["seconds"] > fast["seconds"] >= none["seconds"] == 1.0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_larger_model_fits_if_weights_move() -> None:
    budget = 300_000
    kept, moved = sizes(budget, {"none": (), "all": MOVED}, SMALL)
    assert 0 < kept["width"] < moved["width"]
    assert max(kept["counted"], moved["counted"]) <= budget
