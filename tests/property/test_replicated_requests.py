"""Whole requests with ``schedule.replicas``: predicted bytes, the plain loop, and what is resumed from a checkpoint."""

from __future__ import annotations

import pytest
from test_found import Found

REQUESTS = {
    "uneven micro-batches, resumed": Found(
        "mlp",
        "parallelism.pipeline=3 schedule.replicas=[2,1] schedule.microbatches=5 data.batch_size=14 optimizer=adamw",
        {"saved": 1},
    ),
    "tied weights in gpipe, resumed in one process": Found(
        "tied",
        "schedule=gpipe parallelism.pipeline=4 schedule.replicas=[1,2,1] schedule.microbatches=4 data.batch_size=8"
        " optimizer=sgd",
        {"saved": 2, "resumed": {}},
    ),
    "a stream that keeps versions": Found(
        "mlp",
        "schedule=pipedream parallelism.pipeline=3 schedule.replicas=[2,1] schedule.microbatches=4 data.batch_size=16"
        " optimizer=sgd",
        {"saved": 1},
    ),
    "two versions, and replicas of the whole pipeline": Found(
        "mlp",
        "schedule=pipedream_2bw parallelism.pipeline=3 schedule.replicas=[1,2] parallelism.data=2"
        " schedule.microbatches=2 data.batch_size=12 optimizer=adamw",
    ),
    "replicas of the whole pipeline that share out states": Found(
        "recurrent",
        "parallelism.pipeline=3 schedule.replicas=[1,2] parallelism.data=2 schedule.microbatches=3 data.batch_size=18"
        " optimizer=adamw zero.stage=1 activation_checkpoint=full",
    ),
}
ALWAYS = ("uneven micro-batches, resumed", "a stream that keeps versions")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.costly) for name in REQUESTS]
)
def test_replicas_of_stages(name: str) -> None:
    REQUESTS[name].require_equal()
