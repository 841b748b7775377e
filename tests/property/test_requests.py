"""Whole requests, drawn from the kinds of options themselves, with all oracles at once: see oracles.py."""

from __future__ import annotations

import pytest
from draws import Reach, draw
from requests_of_commit import commit
from shrink import failure_of, shrunk

_QUICK, _FULL, _AT_ONCE = 100, 2000, 10


_SEED = "one"
"""The seed of the quick requests: while what other seeds find is being mended, only ``-m full`` draws by the commit."""

_KNOWN: dict[int, str] = {}
"""What the quick requests have found and nobody has mended yet: the numbers of the requests, and what is wrong."""


def _check(numbers: range, reach: Reach, seed: str) -> None:
    for number in numbers:
        if seed == _SEED and number in _KNOWN:
            continue
        failure = failure_of(draw(f"{seed}:{number}", reach))
        if failure is not None:
            pytest.fail(f"request {number} of seed {seed}:\n{shrunk(failure).text()}")


@pytest.mark.parametrize("first", range(0, _QUICK, _AT_ONCE))
def test_whole_requests(first: int) -> None:
    _check(range(first, first + _AT_ONCE), Reach(), _SEED)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(_QUICK, _FULL, 5 * _AT_ONCE))
def test_more_whole_requests(first: int) -> None:
    _check(range(first, first + 5 * _AT_ONCE), Reach(searching=True), commit())
