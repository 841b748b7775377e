"""ZeRO of stages of which a part is frozen, and of stages that train nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import user_code
from zero_ranks import train_all

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.plan.make import make_plan
from runner.profiling.model import profile_model

GRID = (
    "parallelism.pipeline=2", "parallelism.data=2", "schedule.microbatches=4", "partition=manual",
    "partition.boundaries=[4]", "trainer.grad_clip_norm=0.05",
)  # fmt: skip
KINDS = {
    "ddp": (),
    "zero_1": ("zero.stage=1",),
    "zero_2": ("zero.stage=2",),
    "own_1": ("zero.stage=1", "schedule=zb_h1"),
}


@pytest.mark.full
def test_frozen_weights_keep_their_bits_and_the_others_learn_as_without_zero(tmp_path: Path) -> None:
    found = train_all(
        tmp_path, {name: (*GRID, "trainer.freeze=[0.*]", *words) for name, words in KINDS.items()}, ranks=4
    )
    torch.manual_seed(0)
    start = user_code.model().state_dict()
    for name, result in found.items():
        assert result.loss == pytest.approx(found["ddp"].loss, rel=1e-6), name
        for key, weight in result.weights.items():
            assert torch.equal(weight, start[key]) == (key.split(".")[0] == "0"), (name, key)
            torch.testing.assert_close(found["ddp"].weights[key], weight, atol=2e-6, rtol=2e-6, msg=f"{name}: {key}")


def test_a_stage_that_trains_nothing_is_refused() -> None:
    asked = ("model=mlp", *GRID, "trainer.freeze=[0.*,1.*,2.*,3.*]")
    make_plan(config := resolve([*asked]), profile_model(config))
    config = resolve([*asked, "zero.stage=1"])
    with pytest.raises(RequestError, match="must be 0 where a stage trains nothing"):
        make_plan(config, profile_model(config))
