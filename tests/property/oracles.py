"""What every drawn request must fulfil, and what its runs are compared with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import plain_reference
import property_models
import torch
from draws import STEPS, Drawn
from in_this_process import quietly
from plain_reference import Late, Result, Task
from property_models import KINDS
from safetensors.torch import load_file
from tensor_equality import WrongError, close, is_narrow, require_moved, require_tensors, same_bits, squares
from whole_runs import Run, train

from runner.config.compose.resolve import resolve
from runner.config.precision import PRECISIONS
from runner.config.rules.tensor import OF_PARTS
from runner.config.schema import RunConfig
from runner.errors import DoesNotFitError, RequestError
from runner.launch.run.prepare import prepare
from runner.launch.run.resume import with_checkpoint
from runner.model.load import load_model
from runner.model.ties import crossing_ties, find_ties
from runner.model.traced.operators import trace
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.rules.zero import shares_by_itself
from runner.plan.values import RunPlan
from runner.training.rehearsal import rehearse_run

SCALARS = 64  # bytes of losses, weights of losses and their sums, beside those of each micro-batch
_PER_MICROBATCH = 32
ABOVE = 1.05
"""The most that is counted of what is predicted. It should be 1: recurrent cells in split backwards, and what a rank
lends to another one, are predicted up to a few percent too low."""
TIGHT = 0.75
"""The least share of what is predicted that is counted, where the prediction is no bound. Most plans reach 0.99; in
those that do not, one boundary tensor too many is much beside a small stage."""
_OF_FORMATS = 1.02
"""Convolutions of a single sample, in backwards of two parts, were counted up to 1.8 % above; all else to the byte."""
_OF_UNEVEN = 1e-2
"""The most by which moved bytes differ from planned ones where micro-batches differ in size: what does not grow with
the samples, as a batch norm's statistics, is planned to."""
_QUIET = (
    "device=cpu", "hardware=laptop_cpu", "logger=none", "trainer.progress=false", "launcher.watchdog_seconds=null",
    f"trainer.max_steps={STEPS}", "checkpoint.keep=9",
)  # fmt: skip


@dataclass
class Outcome:
    """What became of a draw: ``refused`` (by which line), ``does not fit``, or ``ran``, and what was compared."""

    kind: str
    told: str = ""
    compared: list[str] = field(default_factory=list)


def check(drawn: Drawn) -> Outcome:
    """Run a drawn request with all oracles.

    Raises:
        WrongError: it breaks one of them.
        Exception: it crashed.
    """
    place = Path(tempfile.mkdtemp(prefix="runner-property-"))
    try:
        with quietly():
            return _check(drawn, place)
    finally:
        shutil.rmtree(place)


def _check(drawn: Drawn, place: Path) -> Outcome:
    try:
        config = _limited(drawn, _resolved(drawn.overrides, f"checkpoint.every={drawn.saved}"))
        if config.zero.stage and not shares_by_itself(config, prepare(config, place_is_made=True).schedule):
            return Outcome("needs processes")  # DeepSpeed has one process group for all threads
        first = train(config, _made(place / "first"), rehearse=drawn.rehearses)
    except RequestError as error:
        if not error.problems or not all(problem.line() for problem in error.problems):
            raise WrongError("refused without a problem") from error
        return Outcome("refused", error.problems[0].line())
    except DoesNotFitError as error:
        return Outcome("does not fit", str(error).splitlines()[0])
    outcome = Outcome("ran")
    _require_bytes(first, config, outcome)
    task = task_of(config, first.plan)
    if task is not None:
        _require_equal(first, plain_reference.train(task), config, task, outcome, exact=_exact(config, first.plan))
    if drawn.resumed is not None:
        _require_resumed(drawn, config, first, place, outcome)
    return outcome


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _resolved(words: Sequence[str], *more: str) -> RunConfig:
    return resolve([*words, *_QUIET, *more])


def _limited(drawn: Drawn, config: RunConfig) -> RunConfig:
    """The request with a limit that is a share of what it needs without one."""
    if drawn.limit is None:
        return config
    plan = prepare(config, place_is_made=True)
    config.memory_limit = drawn.words["memory_limit"] = str(int(max(plan.peak_memory_bytes) * drawn.limit))
    return config


# What is compared


def _slack(run: Run, config: RunConfig) -> int:
    """Bytes of single values: of losses and headers, and of the norm of each weight from each rank, which threads hold
    together while they sum them."""
    weights = list(property_models.build(**config.model.kwargs).parameters())
    norms = 8 * len(weights) * run.plan.topology.world_size if config.trainer.grad_clip_norm is not None else 0
    return SCALARS + _PER_MICROBATCH * config.schedule.computed_microbatches + norms


def _require_bytes(run: Run, config: RunConfig, outcome: Outcome, begin: int = 0) -> None:
    """Counted bytes are at most the predicted ones, and hardly fewer where these are no bound; moves are as planned."""
    slack = _slack(run, config)
    said = run.record.peak_memory_bytes
    for rank, (counted, predicted) in enumerate(zip(said["measured"], said["predicted"], strict=True)):
        if counted > ABOVE * predicted + slack:
            raise WrongError(f"rank {rank} holds {counted} bytes, {predicted} are predicted")
        if not _is_bound(run, config, begin) and predicted > counted / TIGHT + slack:
            raise WrongError(f"rank {rank} is predicted to hold {predicted} bytes, and holds {counted}")
    outcome.compared.append("bytes")
    if not begin:
        _require_rehearsed(run, config, outcome)
    moved, planned = run.record.bytes_moved, run.plan.to_json()["bytes_moved"]
    share = _OF_UNEVEN if _is_uneven(config) else 1e-6
    for kind in ("host_activations", "host_weights", "host_weight_gradients"):
        if planned[kind] is not None and abs(moved[kind] - planned[kind]) > share * planned[kind] + 1e-6:
            raise WrongError(f"{moved[kind]} bytes of {kind} move in a step, {planned[kind]} are planned")


def _require_rehearsed(run: Run, config: RunConfig, outcome: Outcome) -> None:
    """No rank counts more than what a rehearsal on tensors without memory has counted; some can reach its peak later.

    A rehearsal knows bytes that operators on fake tensors leave out by as much as :data:`_OF_FORMATS`.
    """
    with mock.patch("runner.model.sharded.traced.trace", trace):  # those that are shared are of real tensors
        found = rehearse_run(config, run.plan)
    if not found.peak_bytes:
        outcome.told = f"not rehearsed: {found.reason}"
        return
    for rank, counted in enumerate(run.record.peak_memory_bytes["measured"]):
        rehearsed = found.peak_bytes[run.plan.topology.coordinates(rank).pipe]
        if counted > _OF_FORMATS * rehearsed + _slack(run, config):
            raise WrongError(f"rank {rank} holds {counted} bytes, {rehearsed} were rehearsed")
    outcome.compared.append("rehearsal")


def _is_bound(run: Run, config: RunConfig, begin: int) -> bool:
    """Whether the prediction is a bound, or these few steps do not reach the peak: it comes once states and versions
    of weights exist, in a step of a whole batch, where the next one begins before it ends, as it does but at a save."""
    whole = (begin + 2 - bool(begin)) * config.data.batch_size <= len(property_models.samples("mlp"))
    late = _is_uneven(config) or run.plan.schedule.is_asynchronous or config.schedule.post_validation
    late = late or optimizer_of(config.optimizer).compresses  # their momentum, from some step on
    home = config.offload.weights != "none" and config.compression.name != "none"  # what is compressed is there, too
    joined = any(step % (config.checkpoint.every or STEPS) for step in range(begin + 1, STEPS))
    return not whole or not joined or late or home or PRECISIONS[config.precision.name].loss_scaling


def _is_uneven(config: RunConfig) -> bool:
    """Whether micro-batches differ in size; each counts as the largest, and moves bytes as their mean does."""
    unequal = config.schedule.option("shares") is not None
    return unequal or bool(config.data.batch_size % (config.parallelism.data * config.schedule.computed_microbatches))


def task_of(config: RunConfig, plan: RunPlan, splits: Sequence[tuple[int, int | Sequence[float]]] = ()) -> Task | None:
    """The plain loop of a request; None if what it does is no plain loop."""
    schedule, kind = plan.schedule, optimizer_of(config.optimizer)
    precision, several = PRECISIONS[config.precision.name], config.parallelism.data > 1
    if schedule.own_weights or plan.prediction is not None or precision.four_bits or kind.watch is not None:
        return None
    if several and (config.compression.name != "none" or kind.compresses or config.schedule.name == "hetpipe"):
        return None
    if config.approximate_backward.name != "none" or _changes_updates(config):
        return None
    name, kwargs = config.model.kwargs["kind"], dict(config.model.kwargs)
    data, rates = property_models.samples(name), config.lr_scheduler
    return Task(
        model=partial(property_models.build, **kwargs),
        loss=getattr(property_models, KINDS[name].loss),
        inputs=data.inputs,
        targets=data.targets,
        batch=config.data.batch_size,
        splits=splits or [_split(config)] * STEPS,
        optimizer=partial(kind.make, config.optimizer),
        rate=plain_reference.rate_of(rates.name, config.optimizer.lr, rates.min_lr, rates.warmup_steps, STEPS),
        seed=config.seed,
        dtype=getattr(torch, precision.weights),
        autocast=None if precision.autocast is None else getattr(torch, precision.autocast),
        masters=precision.master_weights,
        scale=config.precision.initial_scale if precision.loss_scaling else None,
        clip_norm=config.trainer.grad_clip_norm,
        clip_value=config.trainer.grad_clip_value,
        frozen=config.trainer.freeze,
        late=_late(config, plan) if schedule.is_asynchronous else None,
    )


def _split(config: RunConfig) -> tuple[int, int | Sequence[float]]:
    return config.parallelism.data, config.schedule.option("shares") or config.schedule.computed_microbatches


def _changes_updates(config: RunConfig) -> bool:
    """Whether the schedule changes what an update is, as PipeMare's techniques do."""
    return any(map(config.schedule.option, ("warmup_steps", "lr_rescheduling", "discrepancy_correction")))


def _late(config: RunConfig, plan: RunPlan) -> Late:
    names = [name for name, _ in property_models.build(**config.model.kwargs).named_parameters()]
    stages = {layer: stage for stage, (first, last) in enumerate(plan.partition) for layer in range(first, last + 1)}
    lags = {name: plan.schedule.lags[stages[int(name.split(".")[0])]] for name in names}
    newest = plan.schedule.reads_newest
    return Late(lags, newest, config.checkpoint.every if newest else None)  # a checkpoint waits for all windows


def _exact(config: RunConfig, plan: RunPlan) -> bool:
    """Whether every sum has one order, so that bits are equal."""
    ties = crossing_ties(find_ties(load_model(config).layers), plan.partition) if plan.schedule.stages > 1 else ()
    degrees = config.parallelism
    if config.zero.stage and shares_by_itself(config, plan.schedule) and _begin_anywhere(config):
        return False
    return plan.schedule.sums_in_order and degrees.data <= 2 and degrees.tensor == 1 and not ties


def _begin_anywhere(config: RunConfig) -> bool:
    """Whether a weight in a flat tensor may begin where torch would not let it begin, and matrix products then differ
    in their last bit."""
    weights = property_models.build(**config.model.kwargs).parameters()
    return any(weight.dim() > 1 and weight.numel() % 32 for weight in weights)


def _require_equal(
    run: Run, expected: Result, config: RunConfig, task: Task, outcome: Outcome, *, exact: bool, begin: int = 0
) -> None:
    same = same_bits if exact else partial(close, task=task)
    for step, (own, loss) in enumerate(zip(run.losses, expected.losses, strict=True), 1):
        if own != loss if exact else not abs(own - loss) <= 2e-2 * max(1.0, abs(loss)):
            raise WrongError(f"the loss of step {step} is {own!r}, that of the plain loop {loss!r}")
    if not (config.schedule.post_validation or config.zero.stage or task.masters):
        steps = zip(run.gradients, expected.gradients[begin:], strict=False)
        for step, (got, wanted) in enumerate(steps, 1) if exact else [*enumerate(steps, 1)][:1]:
            parts = config.parallelism.tensor > 1
            divided = {name for name, own in got.items() if parts and own[0].shape != wanted[name].shape}
            whole = {name: each for name, each in wanted.items() if name not in divided}
            require_tensors(got, whole, same, f"gradient of step {step}")
            require_tensors(
                {name: [squares(got[name]) * config.parallelism.tensor / len(got[name])] for name in divided},
                {name: squares([wanted[name]]) for name in divided},
                same,
                f"sum of squares of the gradient of step {step}",
            )
    if config.trainer.ema_decay is None and exact:
        require_tensors(run.weights, expected.weights, same, "weight at the end")
    elif config.trainer.ema_decay is None and not is_narrow(task) and optimizer_of(config.optimizer).name in OF_PARTS:
        require_moved(load_file(Path(config.run_dir or "") / "weights.safetensors"), expected)
    outcome.compared.append("bits" if exact else "rounding")


# What goes on


def _require_resumed(drawn: Drawn, config: RunConfig, first: Run, place: Path, outcome: Outcome) -> None:
    """A second run from a checkpoint of the first: in the same layout the same, in another as the plain loop."""
    (saved,) = (place / "first" / "checkpoints").glob(f"*{drawn.saved}.ckpt")
    words = drawn.resumed or drawn.words
    try:
        more = f"checkpoint.every={drawn.saved}", f"resume={saved}"  # saves drain the pipeline at the same steps
        again = _resolved([f"{key}={value}" for key, value in words.items()], *more)
        if not drawn.resumed:
            again.memory_limit = config.memory_limit
        again = with_checkpoint(again)
        second = train(again, _made(place / "second"), begin=drawn.saved)
    except RequestError as error:
        if not drawn.resumed:
            raise WrongError(f"the same request is refused at a resume: {error.problems[0].line()}") from error
        outcome.compared.append("resume refused")
        return
    except DoesNotFitError:
        return
    _require_bytes(second, again, outcome, drawn.saved)
    if not drawn.resumed:
        if not _keeps_one_workers_states(config):
            _require_unbroken(first, second, drawn)
            outcome.compared.append("resumed")
        return
    split = [_split(config)] * drawn.saved + [_split(again)] * (STEPS - drawn.saved)
    task = task_of(again, second.plan, split)
    if task is not None and task_of(config, first.plan) is not None:
        expected = plain_reference.train(task)
        exact = _exact(config, first.plan) and _exact(again, second.plan)
        _require_equal(second, expected, again, task, outcome, exact=exact, begin=drawn.saved)
        outcome.compared.append("resumed elsewhere")


def _keeps_one_workers_states(config: RunConfig) -> bool:
    """Whether a checkpoint has the states of one of several optimizers, as ``docs/equality.md`` says of ``hetpipe``."""
    own = config.optimizer
    return config.schedule.name == "hetpipe" and config.parallelism.data > 1 and (own.name != "sgd" or own.momentum > 0)


def _require_unbroken(first: Run, second: Run, drawn: Drawn) -> None:
    if first.losses != second.losses:
        raise WrongError(f"resumed after step {drawn.saved}, the losses are {second.losses}, unbroken {first.losses}")
    for name, wanted in first.weights.items():  # ranks that divide a layer have different parts of it
        if not all(any(same_bits(own, each, 0.0) for each in wanted) for own in second.weights[name]):
            raise WrongError(f"the weights {name} of a run that was resumed differ from those of the unbroken one")
