"""Checks, on tensors without memory, that layers which ranks divide give what whole layers give: the same shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.model.boundary import flatten, shapes
from runner.model.load import LoadedModel, load_model
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, to_precision
from runner.profiling.layer_error import about_layer

__all__ = ["part_problems"]


def part_problems(config: RunConfig, parts: LoadedModel, inputs: Any) -> Iterator[Problem]:
    """Yield a problem for the first layer of which the whole gives other shapes than a rank's part.

    Args:
        config: the request.
        parts: its model, of which layers have the parts of one rank.
        inputs: a micro-batch, fake.

    Raises:
        LayerError: a layer does not run with its parts.
    """
    whole = load_model(config)
    if config.parallelism.sequence:  # they give parts
        parts = load_model(replace(config, parallelism=replace(config.parallelism, sequence=False)), shard=0)
    if whole.step is not None:  # a module with a training step of its own is one layer, whose output is a loss
        return
    dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
    value = to_precision(inputs, dtype)
    device = next((tensor.device.type for tensor in flatten(inputs)[0]), "cpu")
    for own, part in zip(whole.layers, parts.layers, strict=True):
        modules = [cast_module(each.build(), dtype) for each in (own, part)]
        with torch.no_grad(), about_layer(own.index, modules[1], value):
            made = [
                autocasting(source.calling(module), device, autocast)(value)
                for source, module in zip((own, part), modules, strict=True)
            ]
        if own is whole.layers[-1] and parts.division is not None and parts.division.logits:
            return  # the loss takes the parts of these logits
        if shapes(made[0]) != shapes(made[1]):
            yield _differs(config, own.index, modules[0], made)
            return
        value = made[0]


def _differs(config: RunConfig, index: int, module: nn.Module, made: list[Any]) -> Problem:
    rule = f"must leave the output of layer {index} ({type(module).__name__}) whole"
    why = f"It gives {shapes(made[0])}, and {shapes(made[1])} if its parts are {config.parallelism.tensor}"
    fix = "a row or a column_gathered after the last column"
    return Problem("parallelism.sharding", config.parallelism.sharding, rule, f"{why}; {fix} puts it together")
