"""Tries a user's own prediction of weights on small ones, with which the optimizer has made a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.optim.build import optimizer_of_run
from runner.optim.catalogue.registry import PREDICTIONS, optimizer_of, prediction_of_users
from runner.optim.forecast import Forecast
from runner.optim.states.master import MasterWeights
from runner.profile import ModelProfile

__all__ = ["try_prediction"]

_LARGEST = 4


def try_prediction(config: RunConfig, profile: ModelProfile) -> None:
    """Refuse a user's formula that predicts no weight: a run would meet it at its second step.

    Args:
        config: the request.
        profile: the profile of its model.

    Raises:
        RequestError: the formula raises an error, or returns no tensor of the weight's shape, or changes the weight.
    """
    section, optimizer = config.weight_prediction, optimizer_of(config.optimizer)
    if section.target is None or section.name in PREDICTIONS:
        return
    is_the_models = config.optimizer.name == "auto" and profile.own_update is not None
    if is_the_models or optimizer.motion is None or optimizer.operator is not None:  # what cannot be made here soon
        return
    weights, kind = [*_weights(profile)], prediction_of_users(section)
    try:
        made = optimizer_of_run(config, weights, delayed=False, averaged=False)
        forecast = Forecast(kind, made)
        _step(made, weights)
    except Exception:  # it may want other weights; the ranks tell
        return
    gap = section.gap or 1.0
    for weight in weights:
        forecast.predict(weight, gap, newest=1, step=1 + int(gap))


def _weights(profile: ModelProfile) -> Iterator[Parameter]:
    """A small weight for each number of axes that the model's trained weights have."""
    shapes = [shape for layer in (*profile.layers, profile.loss) for shape in layer.trained_shapes]
    generator = torch.Generator().manual_seed(0)
    for shape in {len(shape): [min(size, _LARGEST) for size in shape] for shape in shapes}.values():
        yield Parameter(torch.randn(shape, generator=generator))


def _step(optimizer: Optimizer, weights: list[Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for weight in weights:
        updated = optimizer.master_of(weight) if isinstance(optimizer, MasterWeights) else weight
        updated.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()
