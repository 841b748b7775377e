"""Whole requests with ``schedule.shares``: predicted bytes, the plain loop, and what is resumed from a checkpoint."""

from __future__ import annotations

import pytest
from test_found import Found

REQUESTS = {
    "halves first, resumed in one process": Found(
        "mlp",
        "parallelism.pipeline=2 schedule.microbatches=5 schedule.shares=[1,1,2,2,2] data.batch_size=16 optimizer=adamw",
        {"saved": 1, "resumed": {}},
    ),
    "shares that are rounded, in two replicas": Found(
        "recurrent",
        "schedule=gpipe parallelism.pipeline=2 parallelism.data=2 schedule.microbatches=3 schedule.shares=[1,2.5,1]"
        " data.batch_size=15 optimizer=adamw",
    ),
    "two sliced ones that run forward again": Found(
        "tied",
        "parallelism.pipeline=3 schedule.microbatches=6 schedule.shares=[1,1,1,1,2,2] data.batch_size=16 optimizer=sgd"
        " activation_checkpoint=full",
    ),
}
ALWAYS = "halves first, resumed in one process"


@pytest.mark.parametrize(
    "name", [name if name == ALWAYS else pytest.param(name, marks=pytest.mark.costly) for name in REQUESTS]
)
def test_shares_of_microbatches(name: str) -> None:
    REQUESTS[name].require_equal()
