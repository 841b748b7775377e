"""Trains a user's LightningModule as it is: Lightning calls its hooks, the engine its training step or its layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from runner.config.schema import RunConfig
from runner.engine.window import StepBatch, join_microbatches, split_microbatches
from runner.errors import Problem, RequestError
from runner.model.layers import LayerSource, StageModule, build_stage
from runner.model.lightning_module import OwnStep, own_output, scalar_loss, weight_of, with_one_optimizer
from runner.model.load import LoadedModel
from runner.model.modes import evaluating
from runner.model.own_methods import brings
from runner.model.precision import for_loss, to_precision
from runner.model.ties import Tie, find_ties
from runner.plan.cut.partition import Partition
from runner.plan.layout.batches import split_sizes
from runner.strategy.migration import kept_sources, layers_in
from runner.strategy.pipeline import EngineStrategy
from runner.training.module import LayersModule, requested_optimizer
from runner.training.own_hooks import guard_hooks
from runner.training.steps import leave_gradients
from runner.training.validation import LOSS, PREFIX, LoggedFigures, ValidationSums, figures_of, note_means

__all__ = ["TrainedModule", "own_optimizer", "trainable", "validates"]


class TrainedModule(Protocol):
    """The interface that a run needs of the module that the Trainer fits."""

    val_losses: list[list[float]]
    val_metrics: dict[str, list[list[float]]]
    ties: Sequence[Tie]

    def check_metrics(self, batch: StepBatch) -> None:
        """Measure the metrics of a validation batch, and forget them."""
        ...


def trainable(model: LoadedModel, strategy: EngineStrategy, config: RunConfig) -> Any:
    """The module for ``Trainer.fit``: the user's own LightningModule, or one that wraps the layers."""
    if model.module is None:
        return LayersModule(model.layers, model.loss, config, model.division)
    metrics = (*strategy.options.metrics, *model.logs.validation)
    strategy.options = replace(strategy.options, metrics=metrics, figures=model.logs.figures)
    _Bound(model, strategy, config).bind()
    return model.module


def validates(module: Any, step: OwnStep | None) -> bool:
    """Whether validation is possible: a module with its own training step needs its own validation step."""
    return step is None or brings(module, "validation_step")


def own_optimizer(module: Any, target: str) -> Optimizer | None:
    """The optimizer of ``configure_optimizers`` for a plain loop, or None if the module does not define it.

    Raises:
        RequestError: it also returns a scheduler, which the plain loop cannot step.
    """
    if not brings(module, "configure_optimizers"):
        return None
    made = with_one_optimizer(module.configure_optimizers(), target)
    if not isinstance(made, Optimizer):
        rule = "must return an optimizer alone from configure_optimizers to be verified"
        raise RequestError([Problem("model.target", target, rule, "The plain loop steps no scheduler of its own")])
    return made


class _Bound:
    """Replaces some of a module's methods for one run. The module's other hooks are kept and run as usual."""

    def __init__(self, model: LoadedModel, strategy: EngineStrategy, config: RunConfig) -> None:
        assert model.module is not None
        self._module: Any = model.module
        self._model, self._strategy, self._config = model, strategy, config
        self._layers: Sequence[LayerSource] = model.layers
        self._stages = nn.ModuleDict()
        self._released = WeakIdKeyDictionary()
        guard_hooks(self._module, config.model.target, self._released)
        self._sums = ValidationSums()
        self._logged = LoggedFigures(self._module.log)
        self._own_log = self._module.log
        self._own_optimizer = self._module.configure_optimizers
        self._own_validation_step = self._module.validation_step
        self._own_validation_end = self._module.on_validation_epoch_end

    def bind(self) -> None:
        """Set the methods in ``__dict__``, because nn.Module would register a loss module as one more child."""
        self._module.__dict__.update(
            loss_function=self._model.loss,
            ties=find_ties(self._model.layers),
            division=self._model.division,
            val_losses=[],
            val_metrics={},
            check_metrics=self._check_metrics,
            predict_step=self._predict_step,
            build_stages=self._build_stages,
            configure_optimizers=self._configure_optimizers,
            training_step=self._training_step,
            optimizer_zero_grad=leave_gradients,
            validation_step=self._validation_step,
            on_validation_epoch_end=self._on_validation_epoch_end,
        )

    def _build_stages(self, partition: Partition, stages: Sequence[int]) -> Mapping[int, StageModule]:
        layers = self._layers
        built = {stage: build_stage(layers, *partition[stage]) for stage in stages}
        self._stages = nn.ModuleDict({str(stage): module for stage, module in built.items()})
        if all(layer.given is not self._module for layer in layers):  # otherwise the module would be its own descendant
            self._module.pipeline_stages = self._stages
        self._layers = kept_sources(layers, layers_in(built.values()))
        held = {id(parameter) for parameter in self._stages.parameters()}
        for parameter in self._stages.parameters():
            if parameter in self._released:
                del self._released[parameter]
        for layer in layers:
            for name, parameter in layer.given.named_parameters() if layer.given is not None else ():
                if id(parameter) not in held:
                    # It belongs to another rank, so its memory is released here.
                    parameter.data = parameter.data.new_empty(0)
                    self._released[parameter] = layer.full_name(name)
        return built

    def _configure_optimizers(self) -> Any:
        if brings(self._module, "configure_optimizers"):
            return with_one_optimizer(self._own_optimizer(), self._config.model.target)
        return requested_optimizer(self._config, self._stages)

    def _training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        if self._model.step is not None:
            self._model.step.around = self._training
            self._model.step.batch_idx = batch_idx * self._config.schedule.computed_microbatches
        return self._strategy.hand_over(batch)

    @contextmanager
    def _training(self, samples: int) -> Iterator[None]:
        with self._in_hook("training_step", partial(self._own_log, batch_size=samples)):
            yield

    @contextmanager
    def _in_hook(self, name: str, log: Any) -> Iterator[None]:
        """Within the block, log values under this hook and with ``log``, which knows the number of samples.

        Without this, Lightning would weight them by the whole batch.
        """
        before, self._module._current_fx_name = self._module._current_fx_name, name
        self._module.__dict__["log"] = log
        try:
            yield
        finally:
            del self._module.__dict__["log"]
            self._module._current_fx_name = before

    def _validation_step(self, batch: StepBatch, batch_idx: int) -> Any:
        if self._model.step is None:
            self._sums.add_all(self._strategy.options.metrics, self._strategy.validate(batch))
            return None
        if not batch.samples:
            return None
        engine = self._strategy.engine
        assert engine is not None
        engine.settle()
        given = to_precision((batch.inputs, batch.targets), engine.options.dtype)
        arguments = (given, batch_idx)[: len(inspect.signature(self._own_validation_step).parameters)]
        log = partial(self._logged.log, batch.samples)
        with self._in_hook("validation_step", log), self._autocasting():
            made = self._own_validation_step(*arguments)
        loss = scalar_loss(made)
        if PREFIX + LOSS not in self._logged.names and loss is not None:
            counted = weight_of(made)
            weight = float(batch.samples if counted is None else counted)
            self._sums.add(LOSS, float(loss) * weight if weight else 0.0, weight)
        for name, pair in self._measured(batch):
            self._sums.add(name, *pair)
        return made

    def _autocasting(self) -> torch.autocast:
        assert self._strategy.engine is not None
        autocast = self._strategy.engine.options.autocast
        return torch.autocast(self._strategy.root_device.type, autocast, enabled=autocast is not None)

    def _measured(self, batch: StepBatch) -> Iterator[tuple[str, tuple[float, float]]]:
        """The metrics of a batch, by the outputs of :meth:`_outputs`."""
        assert self._strategy.engine is not None
        metrics = self._strategy.engine.options.metrics
        for output, target, samples in self._outputs(batch) if metrics else ():
            for metric in metrics:
                yield metric.name, metric.measure(for_loss(output), target, samples)

    def _outputs(self, batch: StepBatch) -> Iterator[tuple[Any, Any, int]]:
        """Output, target and samples of each micro-batch, computed by the module's own ``layers()`` or ``forward``."""
        engine, compute = self._strategy.engine, own_output(self._module)
        assert engine is not None
        assert compute is not None
        sizes = split_sizes(batch.samples or 0, engine.options.shares or engine.options.microbatches)
        inputs = split_microbatches(to_precision(batch.inputs, engine.options.dtype), sizes)
        targets = split_microbatches(batch.targets, sizes)
        for given, target, samples in zip(inputs, targets, sizes, strict=True):
            if samples:
                with torch.no_grad(), self._autocasting():
                    output = compute(given)
                yield output, target, samples

    def _predict_step(self, batch: StepBatch, batch_idx: int = 0) -> Any:
        """The last layer's output for a batch, in every layout; not the module's own ``predict_step``."""
        if self._model.step is None:
            return self._strategy.predict(batch)
        outputs = [output for output, _, _ in self._outputs(batch)]
        return join_microbatches(outputs) if outputs else None

    def _check_metrics(self, batch: StepBatch) -> None:
        if self._model.step is None:
            self._strategy.validate(batch)
            return
        with evaluating([self._module]):
            list(self._measured(batch))

    def _on_validation_epoch_end(self) -> None:
        own = self._logged.means(self._strategy)
        means = self._sums.means(self._strategy, self._strategy.options.metrics)
        step = self._module.trainer.global_step
        labels = {metric.name: metric.label for metric in self._strategy.options.metrics}
        for name, value in means.items():
            self._own_log(labels.get(name, PREFIX + name), value, prog_bar=name == LOSS, batch_size=1)
        self._own_validation_end()
        note_means(self._module, step, means | figures_of(own))  # what fails before is no validation that came
