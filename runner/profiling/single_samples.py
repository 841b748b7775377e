"""Tries a model and its loss on one sample, if a run has a micro-batch of one among larger ones.

It may be that of the last step of an epoch, where a run would fail when all other steps are done.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError
from runner.model.apart import ApartError, quietly
from runner.model.boundary import map_tensors
from runner.model.precision import autocast_of, dtype_of
from runner.model.seeds import seeded
from runner.plan.layout.single_samples import has_single, last_step, with_two_samples
from runner.profiling.layer_error import LayerError
from runner.profiling.meet import Batch
from runner.profiling.model import faked, profile_layers, samples_of

__all__ = ["try_single_samples"]


def try_single_samples(config: RunConfig, batch: Batch | None, samples: int | None) -> None:
    """Run the model and its loss on one sample without memory, where a larger micro-batch runs so.

    Args:
        config: the request.
        batch: input and target of the first micro-batch; None if the data may not be there yet.
        samples: their number in the training set, or None if they are not counted.

    Raises:
        RequestError: a micro-batch of a run has one sample, which the model or its loss does not take.
    """
    if batch is None or samples_of(config) < 2:  # all of them are single, and the profile has met one
        return
    size = config.data.batch_size if samples is None else min(config.data.batch_size, samples)
    rest = last_step(config, samples) if samples is not None else 0
    if not has_single(config, size) and not has_single(config, rest):
        return
    try:
        why = quietly(_refusal, config, *batch)
    except (ApartError, RequestError):  # code that fake tensors cannot run, which is told by others
        return
    if not why:
        return
    rule = "must leave the model no micro-batch of one sample"
    if has_single(config, size):
        fix = with_two_samples(config, size)
        raise RequestError([Problem("schedule.microbatches", config.schedule.microbatches, rule, why, fix)])
    why = f"The last step of an epoch, {rest} of {samples} samples, has one. {why}"
    raise RequestError([Problem("data.drop_last", False, rule, why, "data.drop_last=true")])


def _refusal(config: RunConfig, inputs: Any, targets: Any) -> str:
    """What the model or its loss says of one sample; empty if they take it, or do not take more of them either."""
    with seeded(config.seed, "one sample"), faked(config, inputs, targets) as (model, *given):
        dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
        run = partial(profile_layers, model.layers, loss=model.loss, dtype=dtype, autocast=autocast)
        try:
            run(*(map_tensors(_first, part) for part in given))
        except LayerError as error:
            run(*given)
            return f"{error.layer[:1].upper()}{error.layer[1:]} does not take it. {error}"
    return ""


def _first(tensor: Tensor) -> Tensor:
    return tensor[:1]
