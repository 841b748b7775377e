"""Matrices of cases: a small part that covers them by default, the whole by ``-m full``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def covering(factors: Mapping[str, Sequence[object]], strength: int = 3, seed: int = 0) -> list[Any]:
    """Every combination of ``factors``' values; those outside of a covering sample are marked ``full`` and ``slow``.

    Every choice of values for any ``strength`` factors occurs in the sample. The sample is a function of the seed.
    """
    cases = list(itertools.product(*factors.values()))
    shuffled = random.Random(seed).sample(cases, len(cases))
    covered: set[tuple[tuple[int, object], ...]] = set()
    sample = set()
    for case in shuffled:
        parts = set(itertools.combinations(enumerate(case), min(strength, len(case))))
        if not parts <= covered:
            covered |= parts
            sample.add(case)
    marks = (pytest.mark.full, pytest.mark.slow)
    return [pytest.param(*case, marks=() if case in sample else marks) for case in cases]
