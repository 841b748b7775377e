"""The pipeline engine as a strategy for a user's own Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, SequentialSampler
from typing_extensions import override

from runner.api.failures import ScriptLauncher, report_failure, tell_refusals
from runner.api.trace import traced_layers, traced_step_layers, training_loaders
from runner.engine.engine import EngineOptions
from runner.engine.loss_scale import LossScaling
from runner.errors import Problem, RequestError, raise_problems
from runner.memory.solve.values import ActivationPlan, Segment
from runner.model.layers import LayerSource, StageModule, build_stage, layers_of
from runner.model.lightning_module import lists_layers
from runner.model.logged_names import not_called_notes
from runner.model.metrics import KeptLogs
from runner.model.own_methods import brings
from runner.model.precision import autocast_of, dtype_of
from runner.model.ties import find_ties
from runner.noise import hide_advice_to_sync, hide_noise
from runner.plan.cut.partition import Partition, partition_problems, uniform
from runner.plan.layout.topology import Topology
from runner.schedule.catalogue import registry
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.lowering.program import lower
from runner.schedule.values import Program, Schedule
from runner.strategy import pipeline
from runner.training.steps import ModuleSteps

__all__ = ["PRECISIONS", "PipelineStrategy", "trainer_options"]

PRECISIONS = {
    "32-true": "fp32",
    "32": "fp32",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16_mixed",
    "16-mixed": "fp16_mixed",
}
"""Lightning's precision flags to the runner's names for them."""

_ARGUMENTS = {
    "parallelism.pipeline": "stages",
    "schedule.microbatches": "microbatches",
    "schedule.chunks": "chunks",
    "partition.boundaries": "boundaries",
}
"""Keys of a request to the arguments of the strategy that say the same."""

_OF_ALL_RANKS = ("loss", "grad_norm", "val_loss", "test_loss")

_LOGGED_INSTEAD = "loss, grad_norm, val_loss and test_loss are logged"


@dataclass(frozen=True)
class _Layout:
    """The parts of a plan that say which rank computes what, without any prediction."""

    topology: Topology
    schedule: Schedule
    program: Program
    partition: Partition = ()
    activations: ActivationPlan = ActivationPlan(())
    prediction: None = None


class PipelineStrategy(pipeline.EngineStrategy):
    """``Trainer(strategy=PipelineStrategy(stages=2, microbatches=4), devices=2)``.

    The engine applies the Trainer's ``precision`` and ``gradient_clip_val``. Gradients are accumulated only over the
    micro-batches of the schedule. The batch size of a DataLoader is that of one step and replica; ``microbatches``
    divides it further.

    Args:
        stages: number of ranks in one pipeline, each with consecutive layers.
        schedule: name of the schedule, e.g. ``gpipe`` or ``1f1b``.
        microbatches: per optimizer step and replica.
        data: number of replicas of the pipeline; ``stages * data`` processes run.
        boundaries: first layer of each stage after the first; default: equal numbers of layers.
        chunks: stages per rank, for schedules with several.
        skip_nonfinite: skip a step whose loss or gradients are not finite, instead of ending the run.
        sizes_vary: whether what passes between stages may have other shapes for inputs of the same shapes, as where a
            layer takes padding out; every message then follows one that describes it.
        scaling: settings of loss scaling, for ``precision="16-mixed"``.
        timeout_seconds: longest wait for a message.

    Raises:
        RequestError: the schedule does not exist or does not accept these numbers.
    """

    def __init__(
        self,
        *,
        stages: int,
        schedule: str = "1f1b",
        microbatches: int = 1,
        data: int = 1,
        boundaries: Sequence[int] | None = None,
        chunks: int | None = None,
        skip_nonfinite: bool = False,
        sizes_vary: bool = False,
        scaling: LossScaling | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        tell_refusals()
        hide_noise()
        try:
            order = fuse_backwards(registry.build(schedule, ranks=stages, microbatches=microbatches, chunks=chunks))
        except RequestError as error:
            raise RequestError(_as_arguments(error.problems)) from None
        spec = registry.find_spec(schedule)
        if spec is not None and spec.prediction is not None:
            why = "It predicts weights from the optimizer's states, as `runner train` does"
            raise_problems([Problem("schedule", schedule, "must be another in a script", why, "schedule='ampnet'")])
        if order.filling is not None:
            why = "Its order follows from the seconds of the layers, which `runner train` takes"
            raise_problems([Problem("schedule", schedule, "must be another in a script", why, "schedule='1f1b'")])
        if order.own_weights:
            why = "Its optimizer updates the weights of every pipeline; `runner train` makes it"
            raise_problems([Problem("schedule", schedule, "must be another in a script", why, "schedule='1f1b'")])
        topology = Topology.grid(stages, data, placement=order.rows)
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # set by seed_everything for other processes
        options = EngineOptions(
            microbatches=microbatches, seed=seed, skip_nonfinite=skip_nonfinite, sizes_vary=sizes_vary
        )
        super().__init__(_Layout(topology, order, lower(order)), options, timeout_seconds=timeout_seconds)
        self.num_nodes = 1  # the Trainer sets it
        self._data = data
        self._boundaries = list(boundaries) if boundaries is not None else None
        self._scaling = scaling or LossScaling()
        self._sources: Sequence[LayerSource] = ()

    # Used by the Trainer's constructor

    @property
    def is_distributed(self) -> bool:
        """True, so that Lightning makes one DistributedSampler order for all ranks of a pipeline."""
        return True

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._data, "rank": self.replica}

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    def set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        processes = len(self.parallel_devices or ())
        self.cluster_environment.set_global_rank(self.node_rank * processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            processes = len(self.parallel_devices or ())
            self._launcher = ScriptLauncher(self.cluster_environment, processes, self.num_nodes)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, Exception):
            report_failure(exception, self.global_rank)

    # Start of a run

    @override
    def connect(self, model: pl.LightningModule) -> None:
        """Adapt a LightningModule with ``loss``, and ``layers()`` or a forward, so that the pipeline can run it."""
        if not isinstance(model, pipeline.PipelineModule):
            self._adapt(model)
        super().connect(model)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.engine is None:
            self._device_type = self.root_device.type
            self.options = replace(self.options, **trainer_options(trainer, self._scaling))
            raise_problems(_overlap_problems(self.plan.schedule, self.options))
        super().setup(trainer)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.last_step is not None and self.lightning_module is not None:
            own = {each.name for each in self.options.figures}
            if "loss" not in own:
                self.lightning_module.log("loss", self.last_step.loss, prog_bar=True, batch_size=1)
            if self.last_step.grad_norm is not None and "grad_norm" not in own:
                self.lightning_module.log("grad_norm", self.last_step.grad_norm, batch_size=1)
        return result

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Leave a loader of the training that does not shuffle its order; Lightning's distributed sampler shuffles."""
        sampler, model = getattr(dataloader, "sampler", None), self.lightning_module
        if isinstance(sampler, DistributedSampler) and sampler.shuffle and model is not None:
            own = [each for each in training_loaders(model) if getattr(each, "dataset", None) is sampler.dataset]
            sampler.shuffle = not any(isinstance(each.sampler, SequentialSampler) for each in own)
        return dataloader

    def _adapt(self, model: pl.LightningModule) -> None:
        raise_problems(_module_problems(model))
        num_stages = self.plan.schedule.stages
        loss: Any = getattr(model, "loss", None)
        logs = KeptLogs()
        if not callable(loss):
            self._sources, loss = traced_step_layers(model, num_stages)
            logs = loss.logs
        elif lists_layers(model) or num_stages == 1:
            self._sources = layers_of(model, self.options.seed, type(model).__name__)
        else:
            self._sources = traced_layers(model, num_stages)
        self.options = replace(self.options, figures=logs.figures, metrics=logs.validation)
        logged = [each.name for each in logs.figures] + [each.label for each in logs.validation]
        hide_advice_to_sync([*_OF_ALL_RANKS, *logged])
        steps = "training_step", "validation_step", "test_step"
        for note in not_called_notes(model, steps, logs.left_out, _LOGGED_INSTEAD):
            rank_zero_info(note)
        name = "uniform" if self._boundaries is None else "manual"
        raise_problems(_as_arguments(partition_problems(name, self._boundaries, num_stages, len(self._sources))))
        partition = _cut(len(self._sources), num_stages, self._boundaries)
        kept = ActivationPlan(tuple((Segment(first, last),) for first, last in partition))
        self.plan = replace(self.plan, partition=partition, activations=kept)  # type: ignore[type-var]  # the _Layout

        def build_stages(cuts: Partition, stages: Sequence[int]) -> Mapping[int, StageModule]:
            built = {stage: build_stage(self._sources, *cuts[stage]) for stage in stages}
            model.pipeline_stages = nn.ModuleDict({str(stage): module for stage, module in built.items()})
            self._sources = ()
            return built

        # Set in __dict__, because nn.Module would register a loss module as one more child.
        model.__dict__.update(loss_function=loss, build_stages=build_stages, ties=find_ties(self._sources))
        ModuleSteps(self, model).bind()


def _as_arguments(problems: Iterable[Problem]) -> list[Problem]:
    """Problems of a request's keys in the words of this strategy's arguments."""

    def named(text: str) -> str:
        for key, argument in _ARGUMENTS.items():
            text = text.replace(key, argument)
        return text

    return [replace(each, path=named(each.path), why=named(each.why), fix=named(each.fix)) for each in problems]


def trainer_options(trainer: pl.Trainer, scaling: LossScaling) -> dict[str, Any]:
    """The engine's options that follow from the Trainer's arguments.

    Raises:
        RequestError: the engine does not support an argument.
    """
    accumulated, precision = trainer.accumulate_grad_batches, str(trainer.precision)
    problems = []
    if accumulated != 1:
        why = "The schedule accumulates over the micro-batches of each batch"
        fix = f"PipelineStrategy(microbatches={accumulated}) and batches {accumulated} times as large"
        problems.append(Problem("Trainer.accumulate_grad_batches", accumulated, "must be 1", why, fix))
    if precision not in PRECISIONS:
        rule = f"must be one of {', '.join(PRECISIONS)}"
        problems.append(Problem("Trainer.precision", precision, rule, fix="precision=bf16-mixed"))
    raise_problems(problems)
    name, most = PRECISIONS[precision], trainer.gradient_clip_val
    by_value = str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower() == "value"
    limit = float(most) if most else None
    return {
        "dtype": dtype_of(name),
        "autocast": autocast_of(name),
        "scaling": scaling if name == "fp16_mixed" else None,
        "clip_value": limit if by_value else None,
        "clip_norm": None if by_value else limit,
    }


def _overlap_problems(schedule: Schedule, options: EngineOptions) -> list[Problem]:
    """What a schedule whose windows overlap cannot have: there is no moment at which all stages are at one step."""
    if not schedule.is_asynchronous:
        return []
    why = "Each stage is updated by itself, at a moment when the other stages are at other steps"
    asked: tuple[tuple[str, object, bool, str], ...] = (
        ("Trainer.gradient_clip_val", options.clip_norm, options.clip_norm is not None, "must be None, or by value"),
        ("Trainer.precision", "16-mixed", options.scaling is not None, "must not scale the loss"),
        ("PipelineStrategy.skip_nonfinite", True, options.skip_nonfinite, "must be False"),
    )
    return [
        Problem(path, value, f"{rule} with schedule={schedule.name}", why, "schedule='1f1b'")
        for path, value, breaks, rule in asked
        if breaks
    ]


def _module_problems(model: pl.LightningModule) -> list[Problem]:
    name = type(model).__name__
    problems = []
    if not callable(getattr(model, "loss", None)) and not brings(model, "training_step"):
        why = "The last stage computes it: def loss(self, output, target) returns a mean over samples, or (sum, weight)"
        problems.append(Problem(name, None, "must have a method loss(output, target) or a training_step", why))
    if not model.automatic_optimization:
        why = "The engine runs forward and backward together and owns the optimizer step"
        problems.append(Problem(f"{name}.automatic_optimization", False, "must be true", why))
    return problems


def _cut(num_layers: int, num_stages: int, boundaries: Sequence[int] | None) -> Partition:
    """First and last layer of each stage: by ``boundaries``, or in equal numbers."""
    if boundaries is None:
        return uniform(num_layers, num_stages)
    firsts = [0, *boundaries]
    return tuple((first, end - 1) for first, end in zip(firsts, [*firsts[1:], num_layers], strict=True))
