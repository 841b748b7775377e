"""The recipe of weights in the host's memory: counted bytes are the planned ones, and the largest width is found."""

from __future__ import annotations

import pytest

from runner.recipes.offloading.weights import largest_width


@pytest.mark.parametrize("most", range(0, 100, 7))
def test_the_largest_width_is_that_of_trying_all(most: int) -> None:
    asked = []

    def fits(width: int) -> bool:
        asked.append(width)
        return width <= most

    assert largest_width(fits, 8) == max((width for width in range(8, 200, 8) if width <= most), default=0)
    assert len(asked) < 12
