"""Whole requests, drawn from the kinds of options themselves, with all oracles at once: see oracles.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from draws import Drawn, Reach, draw
from requests_of_commit import commit
from shrink import failure_of, shrunk

_AMONG, _QUICK, _FULL, _AT_ONCE = 300, 40, 2000, 10
_SEED = "one"
"""The seed of the quick requests; those of the full ones are drawn by the commit. Of the last 570 unseen requests two
failed: if each run drew its own forty, one in eight would fail by chance, whatever the commit changes."""


@cache
def _telling() -> list[int]:
    """The requests among which each next one names most values that none before it names; forty name
    180 values, where the first sixty name 136."""
    left = {number: _values(draw(f"{_SEED}:{number}", Reach())) for number in range(_AMONG)}
    found = list[int]()
    while len(found) < _QUICK:
        taken = max(left, key=lambda number: (len(left[number]), -number))
        named = left.pop(taken)
        left = {number: values - named for number, values in left.items()}
        found.append(taken)
    return found


def _values(request: Drawn) -> set[str]:
    """What a request names: options by their names, and degrees, and that another number is given."""
    layout = ("parallelism.", "zero.")  # whose numbers make another layout
    given = {
        f"{key}={value if key.startswith(layout) or not value[:1].isdigit() else ''}"
        for key, value in request.words.items()
    }
    others = {"limit": request.limit, "resumed": request.resumed, "rehearses": request.rehearses}
    return given | {name for name, is_there in others.items() if is_there}


def _check(numbers: Sequence[int], reach: Reach, seed: str) -> None:
    for number in numbers:
        failure = failure_of(draw(f"{seed}:{number}", reach))
        if failure is not None:
            again = f"python -m tests.property --seed {seed} --only {number}{' --searching' * reach.searching}"
            pytest.fail(f"request {number} of seed {seed} ({again}):\n{shrunk(failure).text()}")


@pytest.mark.parametrize("first", range(0, _QUICK, _AT_ONCE))
def test_whole_requests(first: int) -> None:
    _check(_telling()[first : first + _AT_ONCE], Reach(), _SEED)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, _FULL, 5 * _AT_ONCE))
def test_more_whole_requests(first: int) -> None:
    _check(range(first, first + 5 * _AT_ONCE), Reach(searching=True), commit())
