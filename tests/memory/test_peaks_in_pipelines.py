"""Predicted peaks of stages that hand skip connections on: gradients that the next stage has sent are not freed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from layouts import uniform
from programs import measured_and_predicted
from test_memory_engine import SCALARS
from torch import nn

from runner.memory.solve.policies import strategy_of
from runner.memory.solve.values import PolicyOptions, Segment, StageChain
from runner.model.layers import layers_of
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.recipes.rematerialization.models import MODELS, Task

LAYERS, LAST = 9, 4  # of the model, and of the first of two stages
COUNT = 4  # micro-batches


@cache
def task() -> Task:
    return MODELS["U-Net"]()


def make() -> nn.Module:
    torch.manual_seed(0)
    return task().build()


@cache
def profile() -> ModelProfile:
    inputs, targets = (value[: len(value) // COUNT] for value in task().batch)
    return profile_layers(layers_of(make(), 0), inputs, targets, task().loss, torch.float32)


@pytest.mark.parametrize("strategy", ["rotor", "full"])
def test_a_chain_program_of_a_stage_that_hands_skips_on(strategy: str) -> None:
    """The gradients that it makes itself are freed, while those of its caller stay."""
    candidates = strategy_of(PolicyOptions(strategy)).candidates
    assert candidates is not None
    *_, last = candidates(StageChain(profile(), 0, LAST, in_flight=2))
    stages = last.program, (Segment(LAST + 1, LAYERS - 1),)
    (found, _), (told, _) = measured_and_predicted(make, task().loss, task().batch, stages, "1f1b")
    assert found <= told + SCALARS
    assert told <= 1.001 * found


def test_a_gradient_leaves_without_the_memory_beside_it() -> None:
    """With one sample, the gradient of a concatenated skip is a part of the whole that is contiguous."""
    stages = tuple((Segment(*each),) for each in uniform(LAYERS, 4))
    found, told = measured_and_predicted(make, task().loss, task().batch, stages, "1f1b", 8)
    assert all(real <= said + SCALARS for real, said in zip(found, told, strict=True))
    assert all(said <= 1.005 * real for real, said in zip(found, told, strict=True))
