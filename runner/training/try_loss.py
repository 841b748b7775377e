"""Tries the loss on the ranks before the first step: on the weights, the device and the data that they train with.

The command has tried it on fresh weights if the model is small (:mod:`runner.profiling.try_loss`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from runner.config.schema import RunConfig
from runner.engine.engine import Engine
from runner.engine.window import StepBatch
from runner.errors import RunnerError, raise_problems
from runner.model.boundary import flatten, map_tensors
from runner.model.loss_trial import Tried, num_parts, trial_problems
from runner.model.loss_value import Evaluate, Value, has_samples, of_output, value_of
from runner.model.modes import evaluating
from runner.model.precision import for_loss, to_precision
from runner.model.seeds import seeded
from runner.profile import ModelProfile
from runner.strategy.pipeline import EngineStrategy

__all__ = ["try_loss_on_ranks"]

logger = logging.getLogger(__name__)

_MOST_SAMPLES = 16
_MOST_SAMPLES_OF_STEPS = 4  # each part of them runs the whole model
_MOST_OUTPUT_BYTES = 128 << 20


def try_loss_on_ranks(
    strategy: EngineStrategy, tried: Tried, config: RunConfig, profile: ModelProfile, batch: StepBatch
) -> None:
    """Try the loss on some samples of a rank's first batch. All ranks must call it.

    Args:
        tried: the loss.
        batch: this rank's part of a first batch.

    Raises:
        RequestError: see :func:`runner.profiling.try_loss.try_loss`; on ranks of the last stage.
    """
    engine = strategy.engine
    assert engine is not None
    if tried.is_shipped:
        return
    part = _some(batch, _most_samples(tried, profile))
    evaluate = _of_steps(engine, part) if tried.loss is None else _of_output(strategy, engine, tried, part)
    if evaluate is None or not part.samples:
        return
    with seeded(config.seed, "try the loss"), evaluating(engine.stages.values()):  # batch norms and dropout differ
        try:
            found = trial_problems(tried, evaluate, part.samples, num_parts(config))
        except RunnerError:
            raise
        except Exception as error:  # it is in evaluation mode, which code for training need not know
            logger.info("%s was not tried on parts of a batch: %s: %s", tried.target, type(error).__name__, error)
            return
    raise_problems(found[:1])


def _most_samples(tried: Tried, profile: ModelProfile) -> int:
    if tried.loss is None:
        return _MOST_SAMPLES_OF_STEPS
    per_sample = profile.layers[-1].output_bytes / max(1, profile.samples)
    return max(2, min(_MOST_SAMPLES, int(_MOST_OUTPUT_BYTES // max(1.0, per_sample))))


def _some(batch: StepBatch, most: int) -> StepBatch:
    samples = None if batch.samples is None else min(most, batch.samples)
    inputs, targets = (map_tensors(lambda tensor: tensor[:samples], part) for part in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, samples=samples)


def _of_output(strategy: EngineStrategy, engine: Engine, tried: Tried, part: StepBatch) -> Evaluate | None:
    """The loss of rows of the output of a forward-only window, in which all ranks take part; None on other ranks."""
    output = strategy.predict(part)
    if output is None or part.targets is None or not part.samples:
        return None
    if not has_samples(output, part.samples):  # or other ranks have the outputs of some micro-batches
        if len({row[-1] for row in strategy.plan.schedule.placement}) == 1:
            why = "because the model's output has no axis of samples"
            logger.info("%s was not tried on parts of a batch by the ranks, %s", tried.target, why)
        return None
    weights = [weight for stage in engine.stages.values() for weight in stage.parameters()]
    return of_output(tried.loss, output, part.targets, known=weights if strategy.plan.schedule.stages == 1 else ())


def _of_steps(engine: Engine, part: StepBatch) -> Evaluate | None:
    """The loss of runs of a LightningModule's own ``training_step``, which is its one stage."""
    (stage,) = engine.stages.values()
    if engine.shards:
        logger.info("training_step was not tried on parts of a batch, because its weights are sharded")
        return None
    dtype, autocast = engine.options.dtype, engine.options.autocast
    given, device = to_precision((part.inputs, part.targets), dtype), engine.transport.device
    known = {id(weight) for weight in stage.parameters()}

    def evaluate(rows: Sequence[int]) -> Value:
        index = torch.tensor(list(rows), device=device)
        batch: Any = map_tensors(lambda tensor: tensor[index], given)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            made = stage(batch)
        return value_of(for_loss(made), len(rows), known=known)

    return evaluate if flatten(given)[0] else None
