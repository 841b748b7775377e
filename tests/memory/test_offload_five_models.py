"""Every offload strategy of activations on the models of the recipes, alone and in pipelines: the same bits."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from test_offload_chosen_runs import under
from test_offload_moves import SCALARS, STEPS, Case, Ran, run
from torch import nn

from runner.errors import RequestError
from runner.memory.solve.offloads import OFFLOADS
from runner.recipes.rematerialization.models import MODELS

LAYOUTS = [(1, "1f1b"), (2, "1f1b"), (4, "1f1b"), (2, "zb_h1"), (4, "zb_h1")]
LEFT = 0.7  # of what a stage takes that keeps everything
MOVING = {name: offload for name, offload in OFFLOADS.items() if not offload.lends}  # that one has runs of its own


def case_of(name: str) -> Case:
    task = MODELS[name]()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return task.build()

    return make, task.loss, lambda samples: MODELS[name](samples).batch


@cache
def kept(name: str, pipeline: int, schedule: str) -> Ran:
    return run(case_of(name), None, pipeline=pipeline, schedule=schedule)


def above(ran: Ran) -> list[int]:
    """For each rank, the bytes by which its peak is above the predicted one."""
    return [real - said for real, said in zip(ran.peak, ran.predicted, strict=True)]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("pipeline", "schedule"), LAYOUTS)
@pytest.mark.parametrize("strategy", MOVING)
@pytest.mark.parametrize("name", MODELS)
def test_moves_change_no_bit_and_keep_to_their_plan(name: str, strategy: str, pipeline: int, schedule: str) -> None:
    offload = MOVING[strategy]
    asked = offload if offload.candidates is None else under(offload, LEFT)
    if strategy == "vdnn_conv" and name not in ("ResNet", "U-Net"):
        with pytest.raises(RequestError, match="without convolutions"):
            run(case_of(name), asked, pipeline=pipeline, schedule=schedule)
        return
    found = run(case_of(name), asked, pipeline=pipeline, schedule=schedule)
    plain = kept(name, pipeline, schedule)
    assert found.losses == plain.losses
    assert [key for key in plain.weights if not torch.equal(plain.weights[key], found.weights[key])] == []
    assert found.moved == [STEPS * each for each in found.planned]
    assert found.left == [[0] * STEPS] * pipeline
    assert all(held <= most for held, most in zip(found.held, found.capacity, strict=True))
    assert all(more <= max(SCALARS, most) for more, most in zip(above(found), above(plain), strict=True))
