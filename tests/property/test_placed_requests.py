"""Whole requests with ``schedule.placement``: bytes, the plain loop, a resume; and one that a planner chooses."""

from __future__ import annotations

import json

import pytest
from test_found import Found

from runner.cli.main import main

REQUESTS = {
    "apart, in an order of its own, resumed": Found(
        "mlp",
        "parallelism.pipeline=2 schedule.placement=[0,1,0] schedule.starts=[0,0.2,0.5,0.7,1.2,1.5]"
        " schedule.microbatches=5 data.batch_size=14 optimizer=adamw",
        {"saved": 1},
    ),
    "tied weights, two replicas, resumed in one process": Found(
        "tied",
        "parallelism.pipeline=2 schedule.placement=[1,0,0,1] parallelism.data=2 schedule.microbatches=3"
        " data.batch_size=12 optimizer=sgd",
        {"saved": 2, "resumed": {}},
    ),
    "unlike numbers of stages that run again": Found(
        "recurrent",
        "parallelism.pipeline=3 schedule.placement=[0,1,2,0] schedule.microbatches=4 data.batch_size=12"
        " optimizer=adamw activation_checkpoint=full",
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", REQUESTS)
def test_ranks_of_several_stages(name: str) -> None:
    REQUESTS[name].require_equal()


@pytest.mark.costly
def test_beaumonts_stages_that_are_apart_train_as_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """One stage for each of two devices needs 10.2 MB by the whole plan; two for each fit."""
    words = ["model=gpt", "hardware=a100_80gb", "memory_limit=10MB", "data.batch_size=6", "device=cpu"]
    asked = ["parallelism=auto", "parallelism.ranks=2", "planner=beaumont"]
    assert main(["plan", *words, *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "schedule.placement=[0,1,0,1]" in found["request"]
    assert main(["plan", *words, *asked]) == 0
    assert "1f1b with stages on ranks 0, 1, 0, 1" in " ".join(capsys.readouterr().out.split())
    chosen = [word for word in found["request"] if not word.startswith("memory_limit")]
    assert main(["verify", *chosen, "--steps", "2"]) == 0
    assert "equal bit for bit over 2 steps" in capsys.readouterr().out
