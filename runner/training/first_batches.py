"""Opens the data of a request as its run will, and lets the model meet its first batches, before a run exists.

What a rank would refuse at its start, or at the first validation, is refused here: samples that do not load, a set for
validation that the model does not take, metrics that raise or have nothing to measure, a callback that follows what
nobody logs. Only a model that is small enough to run here meets the batches; for the others the ranks do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, RunFailedError, raise_problems
from runner.model.boundary import map_tensors, num_samples
from runner.model.data import Collate, collated, is_promised, load_datasets, loss_sum
from runner.model.device import device_type
from runner.model.load import LoadedModel, load_model
from runner.model.metrics import load_metrics
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, to_precision
from runner.model.seeds import seeded
from runner.model.targets import explained
from runner.plan.layout.batches import largest_microbatch
from runner.profile import ModelProfile
from runner.profiling.layer_error import LayerError, about_layer, about_loss, refusing
from runner.profiling.model import telling_model_problems
from runner.profiling.try_loss import is_tried_here

__all__ = ["FirstBatches", "first_batches", "meet", "metric_problems"]

_MOST_SAMPLES = 64
_MOST_FLOPS = 1e11  # of one forward; about a second on two CPU cores
_MOST_BYTES = 1 << 30
_OWN = "runner."


Batch = tuple[Any, Any]


@dataclass(frozen=True)
class FirstBatches:
    """The first micro-batches, input and target, of the sets of a request.

    Args:
        training: None if the data has a ``spec``: it may not be there yet, and is left to the ranks.
        validation: None if there is no such set.
    """

    training: Batch | None
    validation: Batch | None


def first_batches(config: RunConfig) -> FirstBatches:
    """Load the first samples of each set of a request.

    Raises:
        RequestError: a rank would refuse the data, a metric or what a callback monitors.
    """
    if is_promised(config.data):
        return FirstBatches(None, None)
    with telling_model_problems(config):
        datasets = load_datasets(config.data, config.seed)
        has_validation = datasets.validation is not None
        raise_problems(metric_problems(config, has_validation=has_validation))
        if config.loss.name != "auto":  # else it may be a LightningModule, which logs what it wants
            raise_problems(_monitor_problems(config, validates=has_validation))
        data, parts = config.data, config.schedule.computed_microbatches
        count = min(max(1, largest_microbatch(data.batch_size, config.parallelism.data, parts)), _MOST_SAMPLES)
        with seeded(config.seed, "first batches"):
            training = _first_batch(config, datasets.train, datasets.collate, count, "samples")
            if not has_validation:
                return FirstBatches(training, None)
            collate, named = datasets.validation_collate, "samples for validation"
            return FirstBatches(training, _first_batch(config, datasets.validation, collate, count, named))


def meet(config: RunConfig, profile: ModelProfile, first: FirstBatches) -> None:
    """Run the model, its loss and the metrics on first batches, if it can run here.

    Args:
        config: the request.
        profile: the profile of its model.
        first: the first samples of its data.

    Raises:
        RequestError: a layer, the loss or a metric raises.
    """
    if first.training is not None and _runs_here(config, profile):
        with seeded(config.seed, "first batches"):
            _run(config, first.training, first.validation)


def metric_problems(config: RunConfig, *, has_validation: bool) -> Iterator[Problem]:
    """A problem if there are metrics and nothing to measure."""
    if config.metrics and not has_validation:
        why = f"{config.data.target} returns no validation set, at whose end they would be evaluated"
        yield Problem("metrics", ",".join(config.metrics), "need a validation set", why)


def _monitor_problems(config: RunConfig, *, validates: bool) -> Iterator[Problem]:
    if config.callbacks:
        from runner.training.users_callbacks import build_callbacks, monitor_problems

        yield from monitor_problems(config, build_callbacks(config), validates=validates)


def _first_batch(config: RunConfig, dataset: Any, collate: Collate, count: int, what: str) -> Batch:
    """The batch of the first samples of a set; ``what`` names them in messages."""
    samples: list[Any] = []
    try:
        if isinstance(dataset, IterableDataset):
            samples += islice(iter(dataset), count)
        else:
            for number in range(min(count, len(dataset))):
                samples.append(dataset[number])
    except Exception as error:
        why = f"Sample {len(samples)} raised {explained(error)}"
        raise RequestError([Problem("data.target", config.data.target, f"must have {what} that load", why)]) from error
    if not samples:
        raise RequestError([Problem("data.target", config.data.target, f"must have {what}", "There is none")])
    try:
        return collated(samples, collate)
    except Exception as error:
        cause = error
        own_words = isinstance(error, RunFailedError)
        said = str(error) if own_words else f"Collating the first {len(samples)} raised {explained(error)}"
    own = config.data.collate is None
    path, value = ("data.target", config.data.target) if own else ("data.collate", config.data.collate)
    raise RequestError([Problem(path, value, f"must have {what} that make a batch", said)]) from cause


def _runs_here(config: RunConfig, profile: ModelProfile) -> bool:
    """Whether the model is run; not where model, data, loss and metrics are all the runner's own."""
    targets = [config.model.target, config.data.target, config.loss.target, *config.metrics.values()]
    flops = sum(layer.forward_flops for layer in profile.layers)
    kept = sum(layer.saved_bytes + layer.weight_bytes for layer in profile.layers)
    own = all(target.startswith(_OWN) for target in targets)
    return not own and flops <= _MOST_FLOPS and kept <= _MOST_BYTES and is_tried_here(config, profile)


def _run(config: RunConfig, training: Batch, validation: Batch | None) -> None:
    """Run the model on the first batches; a LightningModule with steps of its own needs its trainer and is not run."""
    model = load_model(config, cut=False)
    if model.step is not None:
        return
    device = torch.device(device_type(config))
    modules = [cast_module(layer.build(), dtype_of(config.precision.name)).to(device) for layer in model.layers]
    with refusing(config):
        _output(config, model, modules, training, device)
    if validation is None:
        return
    for module in modules:
        module.eval()
    with torch.no_grad():
        try:
            output, targets = _output(config, model, modules, validation, device)
        except LayerError as error:
            rule, why = "must have a validation set that the model takes", f"{error.rule}. {error}"
            raise RequestError([Problem("data.target", config.data.target, rule, why)]) from error
        for metric in load_metrics(config.metrics):
            metric.measure(output, targets, num_samples(validation[0]))


def _output(
    config: RunConfig, model: LoadedModel, modules: Sequence[nn.Module], batch: Batch, device: torch.device
) -> Batch:
    """The model's output, as the loss gets it, and the target; the loss is computed, too.

    Raises:
        LayerError: a layer or the loss raised.
    """
    inputs, targets = (map_tensors(lambda tensor: tensor.to(device), part) for part in batch)
    dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
    value = to_precision(inputs, dtype)
    for source, module in zip(model.layers, modules, strict=True):
        with about_layer(source.index, module, value):
            value = autocasting(source.calling(module), device.type, autocast)(value)
    output = to_precision(value, torch.float32)
    with about_loss((output, targets)):
        loss_sum(model.loss(output, targets), num_samples(inputs))
    return output, targets
