"""``parallelism.free``: what is not named stays as the request has it, set or not."""

from __future__ import annotations

import pytest

from runner.errors import RequestError
from runner.launch.run.find_layout import find_layout
from runner.plan.requested_schedule import resolve_request

WORDS = ("model=mlp", "hardware=a100_80gb", "parallelism=auto", "parallelism.ranks=4", "data.batch_size=32")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("free", "keys"),
    [
        ("pipeline", {"parallelism.pipeline"}),
        ("parallelism.data,zero", {"parallelism.data", "zero.stage"}),
        (
            "pipeline,partition,activation_checkpoint",
            {"parallelism.pipeline", "activation_checkpoint", "partition", "partition.boundaries"},
        ),
    ],
)
def test_only_what_is_free_is_chosen(free: str, keys: set[str]) -> None:
    asked = ("schedule=zb_h1", "schedule.microbatches=4") if "pipeline" in free else ()  # which one rank cannot have
    found = find_layout([*WORDS, *asked, f"parallelism.free=[{free}]"])
    assert {*found.chosen.best.keys} == keys
    config, before = resolve_request(found.words), resolve_request(["model=mlp", *asked])
    held = [each for each in ("pipeline", "data", "tensor") if f"parallelism.{each}" not in keys]
    assert all(getattr(config.parallelism, each) == getattr(before.parallelism, each) for each in held)
    assert config.schedule == before.schedule
    assert (config.partition == before.partition) == ("partition" not in keys)
    assert (config.parallelism.pipeline > 1) == ("pipeline" in free)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallelism.free=[depth]"], "parallelism.free = depth: must be some of pipeline, data,"),
        (["parallelism.free=[precision]"], "batch size, precision, optimizer and seed change what is learned"),
        (["parallelism.free=[dat]"], "Try parallelism.free=[data]."),
        (["parallelism.free=[]"], "must name a key"),
        (["parallelism.free=[schedule]", "schedule=1f1b"], "parallelism.free = schedule: must not be set beside it."),
        (["parallelism.free=[zero]", "zero=1"], "parallelism.free = zero.stage: must not be set beside it."),
        (["parallelism.free=[data]", "planner=dapple"], "must be null with planner=dapple."),
    ],
)
def test_what_cannot_be_free_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(RequestError) as error:
        find_layout([*WORDS, *words])
    assert [told in each.line() for each in error.value.problems] == [True]
