"""Copies of weights and activations that ranks hold, beside Table 3 of the survey of Guan et al. 2024.

The table has neither the copies that predictions and corrections need, nor ``hetpipe`` and vertical synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runner.schedule import build
from runner.schedule.catalogue.registry import SPECS
from runner.schedule.simulation.clock import Costs, simulate
from runner.schedule.stream import versions_held

PIPES = 2  # of avgpipe, its default
ONE, TO_RANKS, TWO = "M", "[M, D M]", "2 M"
PRINTED = {
    "ampnet": ONE, "pipedream": TO_RANKS, "pipedream_2bw": TWO, "wpipe": TWO, "spectrain": ONE, "xpipe": ONE,
    "pipemare": ONE, "avgpipe": "P M",
}  # fmt: skip
"""The copies of its share of the weights that a rank holds, as printed: M is one copy."""
MICROBATCHES = {"pipedream_2bw": 1, "wpipe": 2, "xpipe": 1, "avgpipe": 2}
"""Per rank and step; the others have one per step."""
KINDS = (*PRINTED, "pipedream_vsync", "hetpipe")


def count_of(name: str, ranks: int) -> int:
    return MICROBATCHES[name] * ranks if name in MICROBATCHES else 1


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", PRINTED)
def test_ranks_hold_the_printed_copies(name: str, ranks: int) -> None:
    """But ``wpipe``, of whose two chunks one has two copies, and ``avgpipe``, which holds the average besides."""
    held = versions_held(build(name, ranks=ranks, microbatches=count_of(name, ranks)))
    printed: dict[str, Sequence[float]] = {
        ONE: [1] * ranks,
        TWO: [1.5 if name == "wpipe" else 2] * ranks,
        TO_RANKS: range(ranks, 0, -1),
        "P M": [PIPES + 1] * ranks,
    }
    assert held == tuple(printed[PRINTED[name]])


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", PRINTED)
def test_ranks_hold_the_printed_activations(name: str, ranks: int) -> None:
    """From one micro-batch on the last rank to D on the first; ``wpipe`` at most T, each pipeline of ``avgpipe`` so."""
    count = count_of(name, ranks)
    held = simulate(build(name, ranks=ranks, microbatches=count), Costs()).peak_activations
    if name == "wpipe":
        assert max(held) <= count
    else:
        pipes = PIPES if name == "avgpipe" else 1
        assert held == tuple(pipes * float(number) for number in range(ranks, 0, -1))


def test_the_list_says_of_each_schedule_that_it_is_asynchronous() -> None:
    assert {name for name, spec in SPECS.items() if spec.kind == "asynchronous"} == set(KINDS)
