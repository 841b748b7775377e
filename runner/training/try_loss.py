"""Tries the loss on the ranks before the first step, on the weights that they train, where the command could not."""

from __future__ import annotations

import logging
from dataclasses import replace

from runner.config.schema import RunConfig
from runner.engine.window import StepBatch
from runner.errors import RunnerError, raise_problems
from runner.model.boundary import map_tensors
from runner.model.loss_trial import Tried, trial_problems
from runner.model.loss_value import has_samples, of_output
from runner.model.seeds import seeded
from runner.profile import ModelProfile
from runner.profiling.try_loss import counts_alike, is_tried_here, num_parts
from runner.strategy.pipeline import EngineStrategy

__all__ = ["try_loss_on_ranks"]

logger = logging.getLogger(__name__)

_MOST_SAMPLES = 16
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
    if counts_alike(config) or is_tried_here(config, profile):
        return
    if tried.loss is None:
        logger.info(
            "%s is not tried on parts of a batch before the first step, because the model is large", tried.target
        )
        return
    per_sample = profile.layers[-1].output_bytes / max(1, profile.samples)
    most = max(2, min(_MOST_SAMPLES, int(_MOST_OUTPUT_BYTES // max(1.0, per_sample))))
    samples = None if batch.samples is None else min(most, batch.samples)
    part = replace(
        batch,
        inputs=map_tensors(lambda tensor: tensor[:samples], batch.inputs),
        targets=map_tensors(lambda tensor: tensor[:samples], batch.targets),
        samples=samples,
    )
    output = strategy.predict(part)
    if output is None or part.targets is None or not samples:
        return
    if not has_samples(output, samples):
        logger.info("%s is not tried on parts of a batch: the model's output has no axis of samples", tried.target)
        return
    known = [weight for stage in strategy.engine.stages.values() for weight in stage.parameters()]  # type: ignore[union-attr]
    evaluate = of_output(tried.loss, output, part.targets, known=known if strategy.plan.schedule.stages == 1 else ())
    with seeded(config.seed, "try the loss"):
        try:
            found = trial_problems(tried, evaluate, samples, num_parts(config))
        except RunnerError:
            raise
        except Exception as error:  # the output is that of an evaluation, which a loss of training need not take
            logger.info("%s was not tried on parts of a batch: %s: %s", tried.target, type(error).__name__, error)
            return
    raise_problems(found[:1])
