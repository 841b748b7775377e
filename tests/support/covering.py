"""Matrices of cases: a small part that covers them by default, the whole by ``-m full``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest

_FULL = pytest.mark.full


def covering(
    factors: Mapping[str, Collection[object]],
    strength: int = 3,
    seed: int = 0,
    allowed: Callable[..., bool] = lambda *values: True,
) -> list[Any]:
    """Every combination of ``factors``' values; those outside of a covering sample are marked ``full``.

    Every choice of values for any ``strength`` factors that some allowed case has occurs in the sample, which is a
    function of the seed.
    """
    cases = [case for case in itertools.product(*factors.values()) if allowed(*case)]
    shuffled = random.Random(seed).sample(cases, len(cases))
    covered: set[tuple[tuple[int, object], ...]] = set()
    sample = set()
    for case in shuffled:
        parts = set(itertools.combinations(enumerate(case), min(strength, len(case))))
        if not parts <= covered:
            covered |= parts
            sample.add(case)
    return [pytest.param(*case, marks=() if case in sample else _FULL) for case in cases]


def sampled(cases: Iterable[object], *sample: object) -> list[Any]:
    """``cases``, of which all but those of ``sample`` are marked ``full``."""
    found = list(cases)
    assert all(case in found for case in sample), "the sample has a case that there is not"
    return [pytest.param(case, marks=() if case in sample else _FULL) for case in found]
