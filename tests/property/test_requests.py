"""Whole requests, drawn from the kinds of options themselves, with all oracles at once: see oracles.py."""

from __future__ import annotations

import pytest
from draws import Reach, draw
from requests_of_commit import commit
from shrink import failure_of, shrunk

_QUICK, _FULL, _AT_ONCE = 60, 2000, 10
_SEED = "one"
"""The seed of the quick requests. It becomes that of the commit once 300 unseen requests in a row are good again: since
the last time that they were, layers that ranks divide have come to the draws."""


def _check(numbers: range, reach: Reach, seed: str) -> None:
    for number in numbers:
        failure = failure_of(draw(f"{seed}:{number}", reach))
        if failure is not None:
            again = f"python -m tests.property --seed {seed} --only {number}{' --searching' * reach.searching}"
            pytest.fail(f"request {number} of seed {seed} ({again}):\n{shrunk(failure).text()}")


@pytest.mark.parametrize("first", range(0, _QUICK, _AT_ONCE))
def test_whole_requests(first: int) -> None:
    _check(range(first, first + _AT_ONCE), Reach(), _SEED)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(_QUICK, _FULL, 5 * _AT_ONCE))
def test_more_whole_requests(first: int) -> None:
    _check(range(first, first + 5 * _AT_ONCE), Reach(searching=True), commit())
