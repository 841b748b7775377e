"""Tries the loss of a request on the first samples of its data, with the model's own output, before a run exists.

See :mod:`runner.model.loss_trial` for what is compared. Only a model that is small enough to run here is tried here,
once for each profile; the ranks try all of them (:mod:`runner.training.try_loss`), on the weights that they train.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from runner.config.schema import RunConfig
from runner.errors import Problem, RunnerError, raise_problems
from runner.model.boundary import flatten, map_tensors
from runner.model.data import Datasets, collated, load_datasets
from runner.model.device import device_type
from runner.model.load import LoadedModel, load_model
from runner.model.loss_trial import num_parts, trial_problems, tried_of
from runner.model.loss_value import Evaluate, Value, has_samples, of_output, value_of
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, for_loss, to_precision
from runner.model.seeds import seed_generators, seeded
from runner.profile import ModelProfile
from runner.profiling.meet import is_tried_here, meet

__all__ = ["first_samples", "try_loss"]

logger = logging.getLogger(__name__)

_MOST_SAMPLES = 32
_PROBABILITY = 0.01  # how far the probabilities of a row may be from 1, in a format of eight bits, too
_MOST_BYTES = 1 << 30  # of what the samples of a trial save


def try_loss(config: RunConfig, profile: ModelProfile) -> None:
    """Try the loss of a request, if its model can run here.

    Raises:
        RequestError: the parts of a batch do not give together what the whole batch gives, or the loss does not meet
            its contract.
    """
    is_shipped = config.loss.name != "auto" and config.loss.target.startswith("runner.")
    if is_shipped or not is_tried_here(config, profile):
        return
    with seeded(config.seed, "try the loss"):
        try:
            found = list(_problems(config, profile))
        except RunnerError:
            raise
        except Exception as error:  # a user's model may do in training alone what it is made for
            for samples in first_samples(config, profile):
                meet(config, profile, samples)  # what refuses it is told by its cause alone
            logger.info("the loss was not tried on parts of a batch: %s: %s", type(error).__name__, error)
            return
    raise_problems(found[:1])


def _problems(config: RunConfig, profile: ModelProfile) -> Iterator[Problem]:
    device = torch.device(device_type(config))
    for samples in first_samples(config, profile):
        model = load_model(config, cut=False)
        tried = tried_of(config, model)
        if tried.is_shipped:  # loss=auto
            yield from _guess_problems(config, samples[1])
            return
        inputs, targets = (map_tensors(lambda tensor: tensor.to(device), part) for part in samples)
        count = len(flatten(inputs)[0][0])
        modules = [cast_module(layer.build(), dtype_of(config.precision.name)).to(device) for layer in model.layers]
        evaluate = _evaluation(config, model, modules, inputs, targets, count)
        yield from trial_problems(tried, evaluate, count, num_parts(config))


def _guess_problems(config: RunConfig, targets: Any) -> Iterator[Problem]:
    """A problem if a request names no loss, and its targets cannot be those of the one that is taken then."""
    tensors = flatten(targets)[0]
    if len(tensors) != 1 or not tensors[0].is_floating_point():
        return
    rows = tensors[0].double()
    sums = rows.sum(dim=-1) if rows.dim() else rows
    wrong = sums[((sums - 1).abs() > _PROBABILITY) | (rows.amin(dim=-1) < 0)]
    if wrong.numel():
        why = (
            "Without a name it is cross_entropy, whose targets are ids or probabilities of classes. A row of these, "
            f"which should sum to 1, sums to {wrong.flatten()[0].item():.4g} or has negative numbers"
        )
        yield Problem("loss", config.loss.name, "must be named for these targets", why, "loss=mse")


def _evaluation(
    config: RunConfig, model: LoadedModel, modules: Sequence[nn.Module], inputs: Any, targets: Any, samples: int
) -> Evaluate:
    """The loss of a part of the samples: of rows of the output where it has samples, else of a run of the model."""
    run = _runner(config, model, modules)
    if model.step is None:
        output = run(inputs, targets)
        if has_samples(output, samples):
            weights = [weight for module in modules for weight in module.parameters()]
            return of_output(model.loss, output, targets, known=weights if config.parallelism.pipeline == 1 else ())
    for module in modules:
        module.eval()  # batch norms and dropout would give every part another loss
    first = next(tensor for tensor in flatten(inputs)[0])
    known = {id(weight) for module in modules for weight in module.parameters()}

    def evaluate(rows: Sequence[int]) -> Value:
        index = torch.tensor(list(rows), device=first.device)
        given, wanted = (map_tensors(lambda tensor: tensor[index], part) for part in (inputs, targets))
        output = for_loss(run(given, wanted))
        return value_of(model.loss(output, wanted), len(rows), known=known)

    return evaluate


def _runner(config: RunConfig, model: LoadedModel, modules: Sequence[nn.Module]) -> Callable[[Any, Any], Any]:
    dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)

    def run(inputs: Any, targets: Any) -> Any:
        value = to_precision((inputs, targets) if model.step is not None else inputs, dtype)
        device = flatten(inputs)[0][0].device.type
        with torch.set_grad_enabled(model.step is not None):  # a step may differentiate itself
            for source, module in zip(model.layers, modules, strict=True):
                value = autocasting(source.calling(module), device, autocast)(value)
        return value

    return run


def first_samples(config: RunConfig, profile: ModelProfile) -> Iterator[tuple[Any, Any]]:
    """The first samples of the data and, if they can be chosen, as many that are spread over all of it."""
    datasets = load_datasets(config.data, config.seed)
    per_sample = max(layer.saved_bytes + layer.output_bytes for layer in profile.layers) / max(1, profile.samples)
    count = max(1, min(_MOST_SAMPLES, config.data.batch_size, int(_MOST_BYTES // max(1.0, per_sample))))
    if datasets.streams:
        first = list(islice(iter(datasets.train), count))
        if first:
            yield collated(first, datasets.collate)
        return
    length = len(datasets.train)
    count = min(count, length)
    yield _batch(config, datasets, range(count))
    if length >= 2 * count:
        try:
            spread = _batch(config, datasets, [number * length // count for number in range(count)])
        except Exception:  # a broken sample is told where the run meets it
            return
        yield spread


def _batch(config: RunConfig, datasets: Datasets, numbers: Sequence[int]) -> tuple[Any, Any]:
    samples = []
    for number in numbers:
        seed_generators(config.seed + number)
        samples.append(datasets.train[number])
    return collated(samples, datasets.collate)
