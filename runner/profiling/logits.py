"""Finds out whether the logits that a model returns may stay divided among ranks, for a loss that takes their parts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError
from runner.model.boundary import flatten
from runner.model.load import LoadedModel, load_model
from runner.model.precision import cast_module, dtype_of, to_precision

__all__ = ["load_part"]


def load_part(config: RunConfig, inputs: Any, targets: Any) -> LoadedModel:
    """The model of a request as the first of those ranks has it that divide its layers; whole if none do.

    Args:
        config: the request.
        inputs, targets: a micro-batch, fake if the model is to be.

    Raises:
        RequestError: the loss is to take parts of the logits, and cannot.
    """
    if config.parallelism.tensor == 1:
        return load_model(config)
    logits = "" if config.parallelism.loss == "gathered" else _undivided(config, inputs, targets)
    if config.parallelism.loss == "vocabulary" and not logits:
        rule = "needs a plain cross-entropy that alone reads the logits of a divided layer"
        why = "Here the loss is another, or logits are not divided, or something else reads them and needs all"
        raise RequestError([Problem("parallelism.loss", "vocabulary", rule, why, "parallelism.loss=auto")])
    return load_model(config, shard=0, logits=logits)


def _undivided(config: RunConfig, inputs: Any, targets: Any) -> str:
    """The name of the layer whose logits the model returns, and nothing but the loss reads; or an empty text."""
    from runner.model.sharded.logits import LogitsWatch, is_by_parts

    if not is_by_parts(config.loss) or any(each.is_floating_point() for each in flatten(targets)[0]):
        return ""
    with suppress(Exception):  # what is wrong with the model is told when it is profiled
        eager = replace(config, parallelism=replace(config.parallelism, sequence=False))
        loaded = load_model(eager, cut=False, shard=0)
        if loaded.step is not None or loaded.has_own_loss:
            return ""
        dtype, value = dtype_of(config.precision.name), inputs
        value = to_precision(value, dtype)
        modules = [cast_module(layer.build(), dtype) for layer in loaded.layers]
        *before, last = zip(loaded.layers, modules, strict=True)
        with torch.no_grad():
            for layer, module in before:
                value = layer.calling(module)(value)
            layer, module = last
            with LogitsWatch([(layer.full_name(name), each) for name, each in module.named_modules()]) as watch:
                output = layer.calling(module)(value)
        return str(watch.unread(output))
    return ""
