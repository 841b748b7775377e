"""One process with a plain loop and without the engine: the reference to which every layout is compared.

It takes the layout's own micro-batches, T per replica, in their order; sums their gradients replica by replica, as
replicas do; divides once by the step's weight; clips by the exact norm; and steps. Buffers that a forward changes, such
as running statistics, are kept for each replica; those of the first replica are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.engine.loss_scale import LossScale
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.window import StepBatch, split_microbatches
from runner.errors import RunFailedError
from runner.model.boundary import map_tensors
from runner.model.buffers import ChangedBuffers
from runner.model.data import LossFunction, load_datasets, loss_sum
from runner.model.device import device_type
from runner.model.layers import StageModule, build_stage
from runner.model.load import load_model
from runner.model.precision import autocast_of, cast_module, dtype_of, for_loss, to_precision
from runner.model.seeds import mix_seed, seed_generators, seed_process
from runner.model.targets import import_users_code
from runner.model.ties import find_ties
from runner.optim.build import optimizer_of_run
from runner.optim.learning_rate import build_scheduler
from runner.optim.states.elastic import ElasticAverage
from runner.optim.states.master import MasterWeights
from runner.plan.layout.batches import replica_slice, split_sizes
from runner.plan.values import RunPlan
from runner.record import RunRecord, StepLog
from runner.training.data.loading import make_loader
from runner.training.lightning_module import own_optimizer
from runner.training.scaling import loss_scaling
from runner.training.verify.parts import PartOfModel, WholeModel
from runner.training.verify.recorded_tensors import gradients_of, recorded_steps, weights_of, write_tensors
from runner.training.verify.reference_fills import ReferenceFills
from runner.training.verify.reference_pipelines import ReferencePipelines
from runner.training.verify.reference_versions import ReferenceVersions

__all__ = ["run_divided_reference", "run_reference"]


def run_reference(config: RunConfig, run_dir: Path) -> None:
    """Train in this process as ``config`` says, whatever its degrees, and record the tensors of every step."""
    _train(config, run_dir, WholeModel())


def run_divided_reference(config: RunConfig, run_dir: Path) -> None:
    """The same for the parts of layers that ranks divide: the loop of each is a thread, of which one runs at a time.

    Their sums are made in the order of the parts, as ranks on a CPU make them, so that a layout has the same bits.
    """
    degree = config.parallelism.tensor

    def part(transport: ThreadTransport) -> None:
        with transport.exclusive():
            _train(config, run_dir, PartOfModel(transport, degree))

    run_ranks(degree, part)


def _train(config: RunConfig, run_dir: Path, parts: WholeModel) -> None:
    seed_process(config.seed)
    import_users_code(config)
    device = torch.device(device_type(config))
    dtype = dtype_of(config.precision.name)
    profile = RunPlan.load(run_dir).profile
    is_whole = parts.index is None
    logits = "" if is_whole else profile.divided_logits
    loaded = load_model(config, cut=not is_whole, filled=True, shard=parts.index, logits=logits)
    model = cast_module(build_stage(loaded.layers, 0, len(loaded.layers) - 1).to(device=device), dtype)
    parts.attach(loaded)  # layers are built before ranks meet
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scale = LossScale(loss_scaling(config))
    own = own_optimizer(loaded.module, config.model.target) if loaded.module is not None else None
    optimizer = own or optimizer_of_run(config, trained)
    scheduler = None
    if own is None:
        scheduler = build_scheduler(config, optimizer)
    recorded = recorded_steps(config, profile)
    fills = ReferenceFills(config, run_dir, optimizer, model, find_ties(loaded.layers))
    versions: ReferenceVersions | ReferencePipelines = ReferenceVersions(config, run_dir, model, optimizer)
    pipelines = 1
    if isinstance(optimizer, ElasticAverage):
        versions = ReferencePipelines(optimizer)
        trained, pipelines = list(versions.trained), versions.count
    buffers = _ReplicaBuffers(model, config.parallelism.data)
    with StepLog(run_dir) if parts.is_first else nullcontext() as log:
        for step, batch in zip(range(config.trainer.max_steps), _batches(config, device), strict=False):
            batches = _microbatches(config, batch)
            fills.begin(step)
            total, weight = _accumulate(
                config, model, buffers, loaded.loss, trained, batches, step, scale.of_sum, fills, versions
            )
            counts = weight != 0.0
            finite = counts and parts.agree(_all_finite(total, trained))
            if finite:
                _scale_and_clip(config, optimizer, trained, weight * scale.of_sum / pipelines, parts)
            is_kept = finite and step + 1 in recorded
            gradients = {name: value.clone() for name, value in gradients_of(model).items()} if is_kept else {}
            fills.end()
            if finite:
                seed_generators(mix_seed(config.seed, step, "update"))
                versions.step()
                scale.succeeded()
            elif not (counts and scale.overflowed()) and config.trainer.on_nonfinite == "stop":
                what = "the loss or a gradient is not finite" if counts else "nothing in it counts"
                raise RunFailedError(f"step {step + 1}: {what}")
            if counts:
                scale.weigh(weight)
            versions.stepped()
            if scheduler is not None:
                scheduler.step()
            if log is not None:
                log.write(step=step + 1, loss=total / weight if counts else math.nan, seconds=0.0)
            if step + 1 in recorded:
                gradients, weights = parts.joined(gradients), parts.joined(weights_of(model))
                if parts.is_first:
                    write_tensors(run_dir, step + 1, 0, gradients, weights)
    if parts.is_first:
        RunRecord.load(run_dir).replace(status="ok").save(run_dir)


class _ReplicaBuffers:
    """The buffers of one model, kept separately for each replica."""

    def __init__(self, model: StageModule, replicas: int) -> None:
        self._changed = ChangedBuffers([model])
        self._kept = [self._changed.snapshot() for _ in range(replicas)]
        self._in_use = 0

    def use(self, replica: int) -> None:
        """Put the buffers of another replica into the model, and save the present ones."""
        if replica == self._in_use:
            return
        self._kept[self._in_use] = self._changed.snapshot()
        self._kept[replica].put_back()
        self._in_use = replica


def _batches(config: RunConfig, device: torch.device) -> Iterator[StepBatch]:
    """Every step's whole batch, epoch after epoch."""
    datasets = load_datasets(config.data, config.seed)
    loader = make_loader(
        datasets.train,
        None if datasets.streams else len(datasets.train),
        batch_size=config.data.batch_size,
        data=1,
        replica=0,
        inputs=True,
        targets=True,
        shuffle=config.data.shuffle is not False,
        seed=config.seed,
        drop_last=config.data.drop_last,
        collate=datasets.collate,
    )
    sampler: Any = loader.batch_sampler
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            inputs, targets = (map_tensors(lambda t: t.to(device), part) for part in (batch.inputs, batch.targets))
            yield StepBatch(inputs, targets, batch.samples)
        epoch += 1


def _microbatches(config: RunConfig, batch: StepBatch) -> list[list[tuple[Any, Any, int]]]:
    """For each replica, ``(input, target, samples)`` of its micro-batches."""
    assert batch.samples is not None
    found = []
    for replica in range(config.parallelism.data):
        place = replica_slice(batch.samples, config.parallelism.data, replica)
        sizes = split_sizes(len(range(batch.samples)[place]), config.schedule.parts)
        inputs, targets = (split_microbatches(_part(value, place), sizes) for value in (batch.inputs, batch.targets))
        found.append(list(zip(inputs, targets, sizes, strict=True)))
    return found


def _part(value: Any, place: slice) -> Any:
    """A replica's samples in their own memory, as in the layout, because kernels may sum differently by alignment."""
    return map_tensors(lambda tensor: tensor[place].clone(), value)


def _accumulate(
    config: RunConfig,
    model: StageModule,
    buffers: _ReplicaBuffers,
    loss: LossFunction,
    trained: Sequence[Parameter],
    replicas: Sequence[Sequence[tuple[Any, Any, int]]],
    step: int,
    loss_scale: float,
    fills: ReferenceFills,
    versions: ReferenceVersions | ReferencePipelines,
) -> tuple[float, float]:
    """Return ``(loss sum, weight)`` of a step; its summed gradients, scaled like the loss, are in the parameters."""
    dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
    device = device_type(config)
    totals: list[list[float]] = []
    gradients: list[list[Tensor | None]] = []
    for replica, microbatches in enumerate(replicas):
        for parameter in trained:
            parameter.grad = None
        totals.append([0.0, 0.0])
        buffers.use(replica)
        for own_number, (inputs, targets, samples) in enumerate(microbatches):
            if not samples:
                continue
            number = replica * len(microbatches) + own_number
            with versions.read(own_number) as before_backward:
                with torch.autocast(device, autocast, enabled=autocast is not None), fills.seeing(number):
                    given = (inputs, targets) if model.takes_targets else inputs
                    output = model(to_precision(given, dtype), _seeding(config.seed, step, number))
                total, weight = loss_sum(loss(for_loss(output), targets), samples)
                before_backward()
                (total * loss_scale).backward()  # type: ignore[no-untyped-call]
            totals[-1][0] += float(total.detach().double())
            totals[-1][1] += float(weight)
        gradients.append([parameter.grad for parameter in trained])
    buffers.use(0)
    for index, parameter in enumerate(trained):
        parts = [part for part in (replica[index] for replica in gradients) if part is not None]
        parameter.grad = sum(parts[1:], parts[0]) if parts else None
    return sum(part[0] for part in totals), sum(part[1] for part in totals)


def _seeding(seed: int, step: int, microbatch: int) -> Callable[[int], None]:
    """Return a function that seeds each layer by (step, micro-batch over all replicas, layer)."""

    def before(layer: int) -> None:
        seed_generators(mix_seed(seed, step, microbatch, layer))

    return before


def _all_finite(loss: float, trained: Sequence[Parameter]) -> bool:
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    return math.isfinite(loss) and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _scale_and_clip(
    config: RunConfig, optimizer: Optimizer, trained: Sequence[Parameter], divisor: float, parts: WholeModel
) -> None:
    """Turn sums into means and clip them; for weights with fp32 masters, the masters' fp32 gradients."""
    updated = list(trained)
    if isinstance(optimizer, MasterWeights):
        updated = [optimizer.master_of(parameter) for parameter in trained]
        for parameter, master in zip(trained, updated, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
    for parameter in updated:
        if parameter.grad is not None:
            parameter.grad.div_(divisor)
            if config.trainer.grad_clip_value is not None:
                parameter.grad.clamp_(-config.trainer.grad_clip_value, config.trainer.grad_clip_value)
    if config.trainer.grad_clip_norm is not None:
        _clip(updated, config.trainer.grad_clip_norm, parts)


def _clip(trained: Sequence[Parameter], most: float, parts: WholeModel) -> None:
    """Clip by the global norm: the exact sum of per-parameter squares in float64."""
    reached = [parameter for parameter in trained if parameter.grad is not None]
    gradients = [parameter.grad for parameter in reached if parameter.grad is not None]
    squares = [float(gradient.abs().double().pow(2).sum()) for gradient in gradients]
    norm = math.sqrt(math.fsum(parts.squares(reached, squares)))
    factor = min(1.0, most / (norm + 1e-6))
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
