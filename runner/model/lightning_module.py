"""What a user's LightningModule defines, found out without importing Lightning.

Without a pipeline, its ``training_step`` is the model's one layer: given ``(input, target)``, it returns the loss. In a
pipeline, its ``layers()`` are the layers and its ``loss(output, target)`` is the loss; of a module without them, the
step is traced (:mod:`runner.model.traced.step`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.optim import LBFGS, Optimizer

from runner.config.precision import PRECISIONS
from runner.config.schema import LrSchedulerConfig, OptimizerConfig, RunConfig
from runner.errors import Problem, RequestError
from runner.model.boundary import num_samples
from runner.model.layers import call_whole
from runner.model.logged_names import logged_names
from runner.model.own_callbacks import callback_problems
from runner.model.own_methods import brings, is_lightnings

__all__ = [
    "OwnStep",
    "is_lightning_module",
    "lightning_problems",
    "lightnings_base",
    "lists_layers",
    "loss_of_step",
    "optimizers_in",
    "own_output",
    "scalar_loss",
    "traces_its_step",
    "weight_of",
    "with_one_optimizer",
]

# Methods of LightningModule that the runner does not call, and why.
_BATCHES = "Batches come from data and go to the engine as they are"
_BACKWARD = "The engine runs the backwards of all micro-batches within the optimizer step, and clips by trainer.*"
_UNCALLED = {
    **dict.fromkeys(("backward", "on_before_backward", "on_after_backward", "configure_gradient_clipping"), _BACKWARD),
    **dict.fromkeys(("optimizer_zero_grad", "on_before_zero_grad"), _BACKWARD),
    **dict.fromkeys(("train_dataloader", "val_dataloader", "prepare_data"), _BATCHES),
    **dict.fromkeys(("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"), _BATCHES),
    "configure_model": "The layers are profiled as the model function made them",
}


def is_lightning_module(made: Any) -> bool:
    """Whether a model function returned a LightningModule, of either package name that Lightning has."""
    return any(base.__name__ == "LightningModule" and is_lightnings(base) for base in type(made).__mro__)


def lightnings_base(module: Any) -> Any:
    """The class of Lightning's of which a LightningModule is one."""
    return next(base for base in type(module).__mro__ if base.__name__ == "LightningModule" and is_lightnings(base))


def lightning_problems(module: Any, config: RunConfig) -> list[Problem]:
    """Parts of a LightningModule that the runner does not support, and settings that conflict with its own."""
    return [
        *_mechanics_problems(module, config),
        *(_step_problems(module, config) if brings(module, "training_step") else ()),
        *_metric_problems(module, config),
        *(_optimizer_problems(config) if brings(module, "configure_optimizers") else ()),
    ]


def _mechanics_problems(module: Any, config: RunConfig) -> Iterator[Problem]:
    target, name = config.model.target, type(module).__name__
    if not any(base.__module__.startswith("lightning.") for base in type(module).__mro__):
        why = "The runner uses the package lightning, which does not recognise modules of pytorch_lightning"
        yield Problem("model.target", target, "must be a LightningModule of lightning.pytorch", why)
    if not module.automatic_optimization:
        why = f"{name}.automatic_optimization is False, and the engine owns gradients and optimizer steps"
        yield Problem("model.target", target, "must leave the optimization to Lightning", why)
    for method, why in _UNCALLED.items():
        if brings(module, method):
            yield Problem("model.target", target, f"must not define {name}.{method}, which is not called", why)
    if brings(module, "setup") and not lists_layers(module) and not any(True for _ in module.parameters()):
        why = f"{name}.setup is called by the run, and its layers are profiled and divided before"
        yield Problem("model.target", target, f"must make its layers in {name}.__init__, and has none", why)
    for callback in _own_callbacks(module):
        for problem in callback_problems(callback, "model.target", target):
            what = f"{name}.configure_callbacks makes a {type(callback).__name__}. {problem.why}"
            yield replace(problem, why=what)
    has_loss = callable(getattr(module, "loss", None)) or brings(module, "training_step")
    if has_loss and config.loss.name != "auto":
        why = f"{name} has its own, which it would replace"
        yield Problem("loss", config.loss.name, "must be left out", why, "loss=auto")


def _own_callbacks(module: Any) -> list[Any]:
    """What ``configure_callbacks`` makes; nothing where it needs the Trainer, which is not there yet."""
    if not brings(module, "configure_callbacks"):
        return []
    try:
        made = module.configure_callbacks()
    except Exception:
        return []
    return list(made) if isinstance(made, list | tuple) else [made]


def _step_problems(module: Any, config: RunConfig) -> Iterator[Problem]:
    if config.parallelism.pipeline > 1:
        return
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        why = "The engine hands out micro-batches, not the loader"
        yield Problem("model.target", config.model.target, "must have a training_step(batch, batch_idx)", why)
    why = f"{type(module).__name__}.training_step is one layer, which would be computed twice and save nothing"
    if config.activation_checkpoint.name != "none":
        rule = "must be none without a pipeline"
        fix = "activation_checkpoint=none"
        yield Problem("activation_checkpoint", config.activation_checkpoint.name, rule, why, fix)
    if config.compile:
        why = f"It cannot be known which modules {type(module).__name__}.training_step calls"
        yield Problem("compile", True, "must be false without a pipeline", why, "compile=false")


def _metric_problems(module: Any, config: RunConfig) -> Iterator[Problem]:
    if not config.metrics or config.parallelism.pipeline > 1 or not brings(module, "training_step"):
        return
    name, logged = type(module).__name__, logged_names(module, "validation_step")
    if own_output(module) is None:
        why = f"{name} has neither a forward nor layers(), so that there is no output to measure"
        yield Problem("metrics", ",".join(config.metrics), "must be left out", why)
    if not brings(module, "validation_step"):
        why = f"{name} has no validation_step, so that there is no validation"
        yield Problem("metrics", ",".join(config.metrics), "must be left out", why)
    for metric in config.metrics:
        if f"val_{metric}" in logged:
            why = f"{name}.validation_step logs val_{metric} itself"
            yield Problem(f"metrics.{metric}", config.metrics[metric], "must have another name", why)


def own_output(module: Any) -> Callable[[Any], Any] | None:
    """The function from a batch's input to the module's output: its ``layers()`` in order, or else its ``forward``.

    None if the class has neither. Layers that are made anew by callables are not the module's own.
    """
    lister = getattr(module, "layers", None)
    layers = list(lister()) if callable(lister) and not isinstance(lister, nn.Module) else []
    if layers and all(isinstance(layer, nn.Module) for layer in layers):
        return lambda given: reduce(lambda value, layer: layer(value), layers, given)
    return partial(call_whole, module) if brings(module, "forward") else None


def lists_layers(module: Any) -> bool:
    """Whether a module says itself what its layers are."""
    layers = getattr(module, "layers", None)
    return callable(layers) and not isinstance(layers, nn.Module)


def traces_its_step(module: Any) -> bool:
    """Whether a module has a ``training_step`` and lacks what a pipeline needs besides: layers, or a loss."""
    return brings(module, "training_step") and not (lists_layers(module) and callable(getattr(module, "loss", None)))


def _optimizer_problems(config: RunConfig) -> Iterator[Problem]:
    why, fix = "configure_optimizers of the LightningModule decides", "optimizer=auto lr_scheduler=constant"
    default = OptimizerConfig(name="auto")
    if config.optimizer.name != "auto":
        yield Problem("optimizer", config.optimizer.name, "must be left out", why, fix)
    elif config.optimizer != default:
        changed = [key for key, value in vars(default).items() if getattr(config.optimizer, key) != value]
        for key in changed:
            yield Problem(f"optimizer.{key}", getattr(config.optimizer, key), "must be left out", why, fix)
    if config.lr_scheduler != LrSchedulerConfig(name="constant"):
        yield Problem("lr_scheduler", config.lr_scheduler.name, "must be left out", why, fix)
    if config.partition.migrate is not None:
        why = "The states of its own optimizer are not known to move with single weights"
        rule = "needs an optimizer of the request"
        yield Problem("partition.migrate", config.partition.migrate, rule, why, "partition.migrate=null")
    if config.zero.stage is not None:
        why = "ZeRO updates flat parts of the weights, which an optimizer of its own may not be made for"
        yield Problem("zero.stage", config.zero.stage, "needs an optimizer of the request", why, "zero.stage=null")
    if PRECISIONS[config.precision.name].master_weights:
        why = "Its own optimizer would hold the weights themselves, not fp32 copies of them"
        yield Problem(
            "precision", config.precision.name, "needs an optimizer of the request", why, "precision=bf16_mixed"
        )


class OwnStep:
    """``training_step`` as a layer: takes ``(input, target)`` of a micro-batch, returns its mean loss.

    Where the step returns a dict with a ``weight`` beside its ``loss``, which says what the mean is over, the layer
    returns ``(sum, weight)``.

    Args:
        module: the LightningModule.

    Attributes:
        around: a function from the samples of a micro-batch to the context in which the step runs. By default, logging
            is off, because there is no Trainer.
        batch_idx: passed to the next call, which increases it by one.
    """

    def __init__(self, module: Any) -> None:
        self.around: Callable[[int], AbstractContextManager[None]] = self._muted
        self.batch_idx = 0
        self._module = module
        self._step = module.training_step  # the user's own method, even if a run replaces it on the module
        self._is_numbered = len(inspect.signature(self._step).parameters) > 1

    def __call__(self, batch: tuple[Any, Any]) -> Tensor | tuple[Tensor, Tensor]:
        number, self.batch_idx = self.batch_idx, self.batch_idx + 1
        with self.around(num_samples(batch[0])):
            made = self._step(batch, number) if self._is_numbered else self._step(batch)
        loss = scalar_loss(made)
        if loss is None:
            shown = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            rule = "must return its loss from training_step, a scalar mean over its samples, or a dict with it as loss"
            why = f"It returned {'None' if made is None else shown}"
            raise RequestError([Problem("model.target", type(self._module).__name__, rule, why)])
        weight = weight_of(made)
        return loss if weight is None else _summed(loss, weight)

    @contextmanager
    def _muted(self, samples: int) -> Iterator[None]:
        self._module.__dict__["log"] = _log_nothing
        try:
            yield
        finally:
            del self._module.__dict__["log"]


def scalar_loss(made: Any) -> Tensor | None:
    """The loss in the return value of a step: a scalar, or ``loss`` in a dict; None if there is none."""
    loss = made.get("loss") if isinstance(made, Mapping) else made
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else None


def weight_of(made: Any) -> Tensor | None:
    """What the mean loss in the return value of a step is over: ``weight`` in a dict; None if there is none."""
    weight = made.get("weight") if isinstance(made, Mapping) else None
    return weight if weight is None else torch.as_tensor(weight).detach()


def _summed(loss: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of which a loss is the mean; of nothing, it is 0 and not NaN."""
    if detect_fake_mode() is None and not weight.any():
        return torch.zeros_like(loss).requires_grad_(loss.requires_grad), weight
    return loss * weight, weight


def with_one_optimizer(made: Any, target: str) -> Any:
    """Return the value of ``configure_optimizers`` if it has exactly one optimizer that the engine can step.

    Raises:
        RequestError: it has none, several, or one that the engine cannot step.
    """
    optimizers = list(optimizers_in(made))
    if len(optimizers) != 1:
        rule = "must return one optimizer from configure_optimizers"
        why = f"It returned {len(optimizers)}; the engine steps all weights at once"
        raise RequestError([Problem("model.target", target, rule, why)])
    if isinstance(optimizers[0], LBFGS):
        why = "LBFGS computes the loss several times within a step; the engine computes it once"
        raise RequestError([Problem("model.target", target, "must have an optimizer without a closure", why)])
    return made


def optimizers_in(made: Any) -> Iterator[Optimizer]:
    """The optimizers in the return value of ``configure_optimizers``, in any form that Lightning accepts."""
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, Mapping):
        yield from optimizers_in(made.get("optimizer"))
    elif isinstance(made, list | tuple):
        for each in made:
            yield from optimizers_in(each)


def loss_of_step(output: Any, target: Any) -> Any:
    """The loss function of a model whose only layer returns the loss, or ``(sum, weight)``."""
    return output


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a module's ``log`` when there is no Trainer."""
