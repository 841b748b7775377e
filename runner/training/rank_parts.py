"""Makes what one rank trains: the plan, and its part of the model and of the data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from runner.config.deepspeed import deepspeed_settings
from runner.config.schema import RunConfig
from runner.engine.engine import EngineOptions
from runner.engine.transport.objects import broadcast_value
from runner.errors import Problem, RunFailedError, raise_problems
from runner.model.data import Collate, Datasets, load_datasets
from runner.model.device import device_type
from runner.model.epochs import in_steps
from runner.model.lightning_module import own_output
from runner.model.load import LoadedModel, load_model
from runner.model.logged_names import not_called_notes
from runner.model.loss_trial import Tried, tried_of
from runner.model.metrics import load_metrics, metric_problems
from runner.model.precision import autocast_of, dtype_of
from runner.model.seeds import seeded
from runner.model.targets import import_users_code
from runner.optim.catalogue.registry import compression_of
from runner.plan.rules.zero import shares_by_itself
from runner.plan.time.network import network_of
from runner.plan.time.tensor import scatters
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.strategy.pipeline import EngineStrategy
from runner.strategy.shared import SharedStatesStrategy
from runner.strategy.zero.strategy import ZeroEngineStrategy
from runner.training.agreed_plan import require_same_plan
from runner.training.data.agreement import require_same_samples
from runner.training.data.loading import make_loader
from runner.training.data.streams import count_samples
from runner.training.lightning_module import trainable, validates
from runner.training.scaling import loss_scaling

__all__ = ["EvaluationParts", "RankParts", "load_evaluation_parts", "load_parts", "make_strategy", "planned_model"]


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankParts:
    """What a rank trains: the plan, its part of the model and of the data (training, validation), and its loss.

    The request's ``trainer.max_steps`` are those of its epochs, if it has any.
    """

    config: RunConfig
    profile: ModelProfile
    plan: RunPlan
    strategy: EngineStrategy
    module: Any  # TrainedModule and LightningModule
    loaders: tuple[Any, Any | None]
    loss: Tried


@dataclass(frozen=True)
class EvaluationParts:
    """What a rank evaluates: its part of the model, and the loaders of the sets by name."""

    strategy: EngineStrategy
    module: Any  # TrainedModule and LightningModule
    loaders: dict[str, Any]


def load_parts(config: RunConfig, run_dir: Path, rank: int, *, validate: bool) -> RankParts:
    """Make what this rank trains; all ranks must call it.

    Args:
        run_dir: holds the plan.
        validate: whether validation data is used, if there is any.

    Raises:
        RequestError: the user's model, data or loss does not meet its contract.
        RunFailedError: the model is not the one that was planned.
    """
    import_users_code(config)
    plan = RunPlan.load(run_dir)
    require_same_plan(config, plan)
    strategy = make_strategy(config, plan, sizes_vary=plan.profile.sizes_vary)
    datasets, lengths = _load_data(config, plan, rank)
    config = in_steps(config, lengths[0])
    model = planned_model(config, plan, rank, filled=config.resume is None)
    _tell_not_called(model, "training_step", "validation_step")
    module = trainable(model, strategy, config)
    validate = validate and (model.module is None or validates(model.module, model.step))
    raise_problems(metric_problems(config, has_validation=bool(lengths[1])) if validate else ())
    loaders = _loaders(config, plan, rank, datasets, lengths if validate else (lengths[0], 0))
    return RankParts(config, plan.profile, plan, strategy, module, loaders, tried_of(config, model))


def load_evaluation_parts(
    config: RunConfig, run_dir: Path, rank: int, sets: Sequence[str], *, outputs: bool
) -> EvaluationParts:
    """Make what this rank evaluates; all ranks must call it.

    Args:
        run_dir: holds the plan.
        sets: see :class:`runner.training.evaluation_request.EvaluationRequest`.
        outputs: whether outputs are wanted, of one set, instead of the loss and metrics.

    Raises:
        RequestError: the user's model, data or functions do not meet their contracts, or there is no such set.
        RunFailedError: the model is not the one that was planned.
    """
    import_users_code(config)
    plan = RunPlan.load(run_dir)
    require_same_plan(config, plan)
    strategy = make_strategy(config, plan, sizes_vary=plan.profile.sizes_vary)
    ends = any(_ends(plan, rank))
    datasets = load_datasets(config.data, config.seed, with_test=True) if ends else None
    lengths = _lengths_of_sets(config, plan, rank, datasets, sets)
    wanted = sets or ([*lengths][-1:] if outputs else [*lengths])  # of test and validation, outputs are of the test's
    model = planned_model(config, plan, rank)
    raise_problems(_evaluation_problems(config, plan, model, lengths, wanted, outputs=outputs))
    _tell_not_called(model, *(() if outputs else ("validation_step",)))
    module = trainable(model, strategy, config)
    held = {name: _held_out(datasets, name) for name in wanted}
    loaders = {
        name: make_loader(
            dataset, lengths[name], shuffle=False, collate=collate, **_common_of_loaders(config, plan, rank)
        )
        for name, (dataset, collate) in held.items()
    }
    return EvaluationParts(strategy, module, loaders)


def _tell_not_called(model: LoadedModel, *methods: str) -> None:
    """Log what the steps of a LightningModule would have logged, if they are not called; rank 0 alone shows it."""
    if model.module is None or model.step is not None:
        return
    for note in not_called_notes(model.module, methods, model.logs.left_out):
        logger.info("%s", note)


def _held_out(datasets: Datasets | None, name: str) -> tuple[Any | None, Collate]:
    if datasets is None:
        return None, default_collate
    return {
        "train": (datasets.train, datasets.collate),
        "validation": (datasets.validation, datasets.validation_collate),
        "test": (datasets.test, datasets.test_collate),
    }[name]


def _lengths_of_sets(
    config: RunConfig, plan: RunPlan, rank: int, datasets: Datasets | None, sets: Sequence[str]
) -> dict[str, int]:
    """On every rank, the number of samples of the named sets that there are; without names, validation and test."""
    lengths: dict[str, int] = {}
    if rank == _counting_rank(plan):
        found = {name: _held_out(datasets, name)[0] for name in sets or ("validation", "test")}
        with seeded(config.seed, "count"):
            lengths = {name: count_samples(dataset) for name, dataset in found.items() if dataset is not None}
    if plan.topology.world_size > 1:
        lengths = broadcast_value(lengths, _counting_rank(plan))
        require_same_samples(datasets, config.data.target, config.seed)
    return lengths


def _evaluation_problems(
    config: RunConfig,
    plan: RunPlan,
    model: LoadedModel,
    lengths: Mapping[str, int],
    wanted: Sequence[str],
    *,
    outputs: bool,
) -> Iterator[Problem]:
    for name in [name for name in wanted or ["validation"] if not lengths.get(name)]:
        why = f"{config.data.target} returns no {name} set"
        yield Problem("--set", name, "must be a set of the data", why)
    if not outputs and model.module is not None and not validates(model.module, model.step):
        why = f"{type(model.module).__name__} has its own training_step, and no validation_step"
        yield Problem("model.target", config.model.target, "must define validation_step to be evaluated", why)
    if outputs and model.step is not None and own_output(model.module) is None:
        why = f"{type(model.module).__name__} has neither a forward nor layers()"
        yield Problem("model.target", config.model.target, "must have an output to predict", why)
    if outputs and len({row[-1] for row in plan.schedule.placement}) > 1:
        why = "Each of the last stage's ranks has the outputs of some micro-batches"
        yield Problem("schedule.name", plan.schedule.name, "must have one last stage", why, "schedule=1f1b")


def planned_model(config: RunConfig, plan: RunPlan, rank: int, *, filled: bool = False) -> LoadedModel:
    """The model that was planned.

    Args:
        config, plan: the run's.
        rank: this rank, which may have parts of the weights.
        filled: whether it starts from the weights of ``model.pretrained``, if there are any.

    Raises:
        RunFailedError: the number of layers differs from the plan's.
    """
    shard, logits = plan.topology.coordinates(rank).tensor, plan.profile.divided_logits
    model = load_model(config, filled=filled, shard=shard, logits=logits)
    planned, found = plan.partition[-1][1] + 1, len(model.layers)
    if found != planned:
        why = f"{config.model.target} has made another model here than for the plan"
        raise RunFailedError(f"the plan has {planned} layers, this rank finds {found}: {why}")
    return model


def _compile_share(config: RunConfig) -> float | None:
    section = config.activation_checkpoint
    return section.given.get("share") if section.target is None else None  # options of one's own mean something else


def make_strategy(config: RunConfig, plan: RunPlan, *, sizes_vary: bool) -> EngineStrategy:
    """The strategy that a request asks for, of one rank of its plan."""
    options = EngineOptions(
        microbatches=config.schedule.computed_microbatches,
        shares=tuple(config.schedule.option("shares") or ()),
        dtype=dtype_of(config.precision.name),
        seed=config.seed,
        clip_norm=config.trainer.grad_clip_norm,
        clip_value=config.trainer.grad_clip_value,
        autocast=autocast_of(config.precision.name),
        scaling=loss_scaling(config),
        skip_nonfinite=config.trainer.on_nonfinite == "skip",
        compile=config.compile,
        compile_share=_compile_share(config),
        post_validation=config.schedule.post_validation,
        warmup_steps=config.schedule.option("warmup_steps") or 0,
        rescheduling_steps=config.schedule.option("lr_rescheduling"),
        twin_check_every=config.schedule.twin_check_every,
        tensor_sums=config.parallelism.tensor_sums,
        link_delay_seconds=config.transport.delay_seconds,
        link_bytes_per_second=config.transport.bytes_per_second,
        link_between=partial(network_of(config).emulated, ranks=plan.topology.world_size)
        if config.transport.emulate_links
        else None,
        speeds=tuple(each.speed for each in plan.devices) if device_type(config) == "cpu" else (),
        offload_delay_seconds=config.offload.delay_seconds,
        offload_bytes_per_second=config.offload.bytes_per_second,
        offload_drive=None if config.offload.drive is None else Path(config.offload.drive),
        metrics=load_metrics(config.metrics),
        sizes_vary=sizes_vary,
        scatters=scatters(config),
    )
    device = device_type(config)
    placed: dict[str, Any] = {"device": device, "timeout_seconds": config.launcher.message_timeout_seconds}
    if config.zero.stage is None:
        plain = config.compression.name == "none"
        reducer = None if plain else partial(compression_of(config.compression).reducer, config.compression)
        return EngineStrategy(plan, options, reducer=reducer, **placed)
    if shares_by_itself(config, plan.schedule):
        return SharedStatesStrategy(plan, options, **placed)
    return ZeroEngineStrategy(plan, options, deepspeed_settings(config, accelerated=device == "cuda"), **placed)


def _ends(plan: RunPlan, rank: int) -> tuple[bool, bool]:
    """Whether this rank has the first stage, and whether it has the last."""
    stages = plan.topology.stages_of(rank)
    return 0 in stages, plan.schedule.stages - 1 in stages


def _counting_rank(plan: RunPlan) -> int:
    """The rank that counts the samples for all: of those that have the first stage, and so the data, the first one."""
    return plan.topology.rank_of(0, replica=0, shard=0, row=0)


_Lengths = tuple[int | None, int]


def _load_data(config: RunConfig, plan: RunPlan, rank: int) -> tuple[Datasets | None, _Lengths]:
    """The datasets on ranks that need them, and on every rank their lengths; None for iterable training data.

    Raises:
        RunFailedError: ranks that load the data got different data.
    """
    datasets = load_datasets(config.data, config.seed) if any(_ends(plan, rank)) else None
    lengths: _Lengths = (0, 0)
    if datasets is not None and rank == _counting_rank(plan):
        with seeded(config.seed, "count"):
            validation = count_samples(datasets.validation) if datasets.validation is not None else 0
        lengths = (None if datasets.streams else len(datasets.train), validation)
    if plan.topology.world_size > 1:
        lengths = broadcast_value(lengths, _counting_rank(plan))
        require_same_samples(datasets, config.data.target, config.seed)
    return datasets, lengths


def _loaders(
    config: RunConfig, plan: RunPlan, rank: int, datasets: Datasets | None, lengths: _Lengths
) -> tuple[Any, Any | None]:
    common = _common_of_loaders(config, plan, rank)
    data = datasets or Datasets(None, None)
    shuffle = config.data.shuffle is not False
    training = make_loader(
        data.train, lengths[0], shuffle=shuffle, drop_last=config.data.drop_last, collate=data.collate, **common
    )
    if not lengths[1]:
        return training, None
    collate = data.validation_collate
    return training, make_loader(data.validation, lengths[1], shuffle=False, collate=collate, **common)


def _common_of_loaders(config: RunConfig, plan: RunPlan, rank: int) -> dict[str, Any]:
    """The arguments that the loaders of all sets of a rank share."""
    first, last = _ends(plan, rank)
    return {
        "batch_size": config.data.batch_size,
        "data": plan.layout["data"],
        "replica": plan.topology.coordinates(rank).data,
        "inputs": first,
        "targets": last,
        "seed": config.seed,
        "workers": config.data.workers,
        "check_every": config.data.check_every,
    }
