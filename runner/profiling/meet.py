"""Lets the model of a request meet the first batches of its data, before a run exists.

What a rank would refuse at its first step, or at the first validation, is refused here, in the command. Only a model
that is small enough to run here meets the batches; for the others the ranks do it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError
from runner.model.boundary import map_tensors, num_samples
from runner.model.data import loss_sum
from runner.model.device import device_is_here, device_type
from runner.model.load import LoadedModel, load_model
from runner.model.metrics import load_metrics
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, for_loss, to_precision
from runner.model.seeds import seeded
from runner.profile import ModelProfile
from runner.profiling.layer_error import LayerError, about_layer, about_loss, refusing
from runner.profiling.whole_forward import refuse_another_forward
from runner.targets import import_target

__all__ = ["Batch", "is_tried_here", "loss_of_batch", "meet", "runs_here"]

_MOST_FLOPS = 1e11  # of one forward, and of all forwards that try the loss; about a second on two CPU cores
_MOST_BYTES = 1 << 30
_FORWARDS = 24  # of a model that computes its loss itself, where the loss is tried
_MOST_NAMES = 3
_OWN, _OF_OTHERS = "runner.", "runner.zoo.huggingface:build"  # which makes what transformers has

logger = logging.getLogger(__name__)

Batch = tuple[Any, Any]


def meet(config: RunConfig, profile: ModelProfile, training: Batch | None, validation: Batch | None = None) -> None:
    """Run the model, its loss and the metrics on first batches, if it can run here.

    Args:
        config: the request.
        profile: the profile of its model.
        training: input and target of the first micro-batch; None if the data may not be there yet.
        validation: input and target of the first micro-batch of the validation set; None if there is none.

    Raises:
        RequestError: a layer, the loss or a metric raises.
    """
    if training is not None and runs_here(config, profile):
        with seeded(config.seed, "first batches"):
            _run(config, training, validation)


def is_tried_here(config: RunConfig, profile: ModelProfile) -> bool:
    """Whether the loss is tried by the command, too: its data is prepared, its device is here, its model is small."""
    is_prepared = getattr(import_target("data.target", config.data.target), "spec", None) is None
    if not is_prepared or not device_is_here(config):
        return False
    flops = sum(layer.forward_flops for layer in profile.layers) / max(1, profile.samples)
    weights = sum(layer.weight_bytes for layer in profile.layers)
    largest = max(layer.saved_bytes + layer.output_bytes for layer in profile.layers) / max(1, profile.samples)
    return flops * 2 * _FORWARDS <= _MOST_FLOPS and weights + 2 * largest <= _MOST_BYTES


def runs_here(config: RunConfig, profile: ModelProfile, times: int = 1) -> bool:
    """Whether the model is run, so many times; not where model, data, loss and metrics are all the runner's own."""
    targets = [config.model.target, config.data.target, config.loss.target, *config.metrics.values()]
    flops = sum(layer.forward_flops for layer in profile.layers)
    kept = sum(layer.saved_bytes + layer.weight_bytes for layer in profile.layers)
    own = all(target.startswith(_OWN) and target != _OF_OTHERS for target in targets)
    is_small = flops * times <= _MOST_FLOPS and kept * times <= _MOST_BYTES
    return not own and is_small and is_tried_here(config, profile)


def loss_of_batch(
    config: RunConfig, model: LoadedModel, modules: Sequence[nn.Module], batch: Batch, device: torch.device
) -> Tensor:
    """The sum of the loss of a batch; see :func:`meet`."""
    with refusing(config):
        return _output(config, model, modules, batch, device)[2]


def _run(config: RunConfig, training: Batch, validation: Batch | None) -> None:
    """Run the model on the first batches; a LightningModule with steps of its own needs its trainer and is not run."""
    model = load_model(config, cut=False)
    if model.step is not None:
        return
    device = torch.device(device_type(config))
    modules = [cast_module(layer.build(), dtype_of(config.precision.name)).to(device) for layer in model.layers]
    before = _versions(model, modules)
    with refusing(config):
        _, _, total = _output(config, model, modules, training, device)
    after = _versions(model, modules)
    _look_for_changes(config, {name: kind for (name, kind), seen in before.items() if after.get((name, kind)) != seen})
    _look_for_unreached(config, model, modules, total)
    inputs = map_tensors(lambda tensor: tensor.to(device), training[0])
    refuse_another_forward(model, to_precision(inputs, dtype_of(config.precision.name)), config.model.target)
    if validation is None:
        return
    for module in modules:
        module.eval()
    with torch.no_grad():
        try:
            output, targets, _ = _output(config, model, modules, validation, device)
        except LayerError as error:
            rule, why = "must have a validation set that the model takes", f"{error.rule}. {error}"
            raise RequestError([Problem("data.target", config.data.target, rule, why)]) from error
        for metric in load_metrics(config.metrics):
            metric.measure(output, targets, num_samples(validation[0]))


def _versions(model: LoadedModel, modules: Sequence[nn.Module]) -> dict[tuple[str, str], tuple[int, int]]:
    """For each weight, and each buffer but those of norms over batches: which tensor it is, and how often it changed.

    What training reads of a norm over a batch is that of the batch; its buffers are for evaluation.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for source, module in zip(model.layers, modules, strict=True):
        for path, each in module.named_modules():
            buffers = () if isinstance(each, _NormBase) else each.named_buffers(recurse=False)
            tensors = {"weight": each.named_parameters(recurse=False), "buffer": buffers}
            for kind, named in tensors.items():
                for name, tensor in named:
                    found[source.full_name(f"{path}.{name}" if path else name), kind] = id(tensor), tensor._version
    return found


def _look_for_changes(config: RunConfig, changed: Mapping[str, str]) -> None:
    """Refuse a forward that changes weights, and tell which buffers it changes, if each replica would change its own.

    Args:
        config: the request.
        changed: what a forward of a first batch has changed, ``weight`` or ``buffer`` by its name.
    """
    replicas = config.parallelism.data
    if replicas == 1 or not changed:
        return
    weights = [name for name, kind in changed.items() if kind == "weight"]
    if weights:
        rule = "must be 1 with a model whose forward changes its weights"
        why = f"Each replica would change its own copy of {weights[0]}, by the samples that it has"
        raise RequestError([Problem("parallelism.data", replicas, rule, why, "parallelism.data=1")])
    logger.warning(
        "each replica has its own %s, which a forward changes: if training reads that, losses are not those of one "
        "process",
        _listed(list(changed)),
    )


def _look_for_unreached(config: RunConfig, model: LoadedModel, modules: Sequence[nn.Module], total: Tensor) -> None:
    """Tell which trained weights no gradient of a first batch's loss reaches; of adapters, refuse them."""
    pairs = zip(model.layers, modules, strict=True)
    trained = {source.full_name(name): each for source, module in pairs for name, each in module.named_parameters()}
    trained = {name: weight for name, weight in trained.items() if weight.requires_grad}
    weights = list(trained.values())
    is_there = bool(weights) and total.requires_grad
    if is_there:
        torch.autograd.backward(total)  # re-entrant checkpoints of a layer take no other way
    unreached = [name for name, weight in trained.items() if weight.grad is None]
    for weight in weights:
        weight.grad = None
    if unreached and config.adapter.name != "none":
        rule = "must name layers that are called"
        why = f"No gradient reaches {unreached[0]}: its layer's weight is read by something else, which passes it by"
        raise RequestError([Problem("adapter.targets", config.adapter.targets, rule, why)])
    if unreached:
        logger.warning("no gradient of a first batch reaches %s: what nothing uses is not trained", _listed(unreached))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _output(
    config: RunConfig, model: LoadedModel, modules: Sequence[nn.Module], batch: Batch, device: torch.device
) -> tuple[Any, Any, Tensor]:
    """The model's output, as the loss gets it, the target, and the sum of the loss.

    Raises:
        LayerError: a layer or the loss raised.
    """
    inputs, targets = (map_tensors(lambda tensor: tensor.to(device), part) for part in batch)
    dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
    value = to_precision(inputs, dtype)
    for source, module in zip(model.layers, modules, strict=True):
        with about_layer(source.index, module, value):
            value = autocasting(source.calling(module), device.type, autocast)(value)
    output = for_loss(value)
    with about_loss((output, targets)):
        total = loss_sum(model.loss(output, targets), num_samples(inputs))[0]
    return output, targets, total
