"""Checks a request completely before anything is written or started, and writes what the ranks read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.compose.length_notes import length_notes
from runner.config.compose.resolve import fingerprint, save, to_container
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.errors import DoesNotFitError, Problem, RequestError, raise_problems
from runner.files import remove_unfinished
from runner.launch.failure import error_file
from runner.launch.needs.packages import missing_for_plan, missing_packages
from runner.launch.needs.zero import zero_needs
from runner.launch.run.directory import check_run_directory
from runner.launch.run.machines import MachineFacts, this_machine
from runner.launch.run.resume import absent_checkpoint, continue_record
from runner.plan.layout.empty_microbatches import empty_microbatch_notes
from runner.profile import PROFILE_FILE
from runner.progress import doing
from runner.record import RECORD_FILE, STEPS_FILE, RunRecord, environment, step_seconds, write_atomically

if TYPE_CHECKING:
    from runner.plan.values import RunPlan

__all__ = [
    "CONFIG_FILE",
    "callable_problems",
    "check_elsewhere",
    "compile_operators",
    "first_record",
    "place_of",
    "prepare",
    "tell_plan",
    "write_request",
    "write_submitted",
]

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
_PREDICTED = ("seconds_source", "parameters", "trained_parameters")  # of the plan's document, in a record's extras


def prepare(config: RunConfig, *, place_is_made: bool = False, machine: MachineFacts | None = None) -> RunPlan:
    """Return the plan of a request that may start; nothing is written to the run directory.

    Operators of DeepSpeed are compiled here, once per machine, and not by the ranks in the middle of the run.

    Args:
        config: the resolved request.
        place_is_made: whether the run directory has already been made, as a sweep does.
        machine: the smallest machine of the run; None: this one.

    Raises:
        RequestError: the sections, the run directory or the plan have problems; the error contains all of them.
        DoesNotFitError: a rank would need more than ``memory_limit``.
    """
    from runner.launch.run.measured_plan import measured_plan
    from runner.model.check_pretrained import pretrained_problems
    from runner.model.compiled import compile_problems, kernel_problems
    from runner.model.device import device_type
    from runner.profiling.meet import meet
    from runner.profiling.single_samples import try_single_samples
    from runner.training.first_batches import first_batches
    from runner.training.try_parts import try_parts

    place = [] if place_is_made else check_run_directory(config)
    cuda = device_type(config) == "cuda"
    needs = [*compile_problems(config.compile, cuda=cuda), *kernel_problems(config.kernels, cuda=cuda)]
    needs += zero_needs(config, cuda=cuda)
    needs += [*missing_packages(config).values()]
    needs += [*_message_problems(config, cuda=cuda), *_device_problems(config, cuda=cuda)]
    raise_problems([*rules(config), *place, *absent_checkpoint(config), *callable_problems(config), *needs])
    raise_problems(pretrained_problems(config))
    _check_epochs(config)
    first = first_batches(config)
    with doing("planning ..."):
        plan = measured_plan(config, **asdict(machine or this_machine(config)))
        if not plan.fits:
            from runner.launch.run.rehearsed_plan import unless_counted_to_fit

            plan = unless_counted_to_fit(config, plan)
    if not plan.fits:
        raise DoesNotFitError("\n".join(problem.line() for problem in plan.problems), plan.problems)
    raise_problems(plan.problems)
    meet(config, plan.profile, first.training, first.validation)
    try_single_samples(config, first.training, first.samples)
    try_parts(config, plan.profile, first.training)
    for note in [*empty_microbatch_notes(config), *length_notes(config), *first.notes(config.data.batch_size)]:
        logger.warning("%s", note)
    compile_operators(config)
    return plan


def tell_plan(plan: RunPlan, about: Collection[str] | None = None) -> None:
    """Log how many parameters are trained, and what the plan warns of, once nothing refuses the request any more.

    Args:
        about: what may be warned of; None: everything.
    """
    from runner.plan.cautions import told
    from runner.plan.render import trained_of_all

    logger.info("%s", trained_of_all(plan))
    for line in told([each for each in plan.cautions if about is None or each.about in about]):
        logger.warning("%s", line)


def _check_epochs(config: RunConfig) -> None:
    """Log how many steps the epochs of a request are.

    Raises:
        RequestError: see :func:`runner.model.epochs.in_steps`.
    """
    from runner.model.epochs import count_epoch_samples, epochs_said, in_steps

    if config.trainer.max_epochs is not None:
        samples = count_epoch_samples(config)
        logger.info("%s", epochs_said(in_steps(config, samples), samples))


def _device_problems(config: RunConfig, *, cuda: bool) -> Iterator[Problem]:
    from runner.model.device import device_is_here, ranks_of_a_device

    if config.profiler.name == "nvtx" and not cuda:
        why = "NVTX ranges are those of CUDA's tools, and this run has no GPU"
        yield Problem("profiler", "nvtx", "must be another here", why, "profiler=pytorch")
    if cuda and device_is_here(config) and config.zero.stage is not None and ranks_of_a_device(config) > 1:
        why = "DeepSpeed's messages are NCCL's, which refuses ranks that share a GPU"
        yield Problem("zero.stage", config.zero.stage, "needs a GPU for each rank", why, "zero.stage=null")
    if not device_is_here(config):
        why = "torch sees no GPU here, `runner doctor` says why"
        yield Problem("device", config.device, "must be another on this machine", why, "device=cpu")


def _message_problems(config: RunConfig, *, cuda: bool) -> Iterator[Problem]:
    if config.schedule.option("opportunistic") and cuda:
        why = "NCCL runs a channel's messages in the order of their launch, and tells the device alone of arrivals"
        yield Problem("schedule.opportunistic", True, "must be false on GPUs", why, "schedule.opportunistic=false")


def compile_operators(config: RunConfig) -> None:
    """Compile the operators of DeepSpeed that this request needs, on this machine.

    Raises:
        RequestError: the compiler failed.
    """
    from runner.config.deepspeed import deepspeed_settings
    from runner.model.device import device_type
    from runner.optim.catalogue.registry import optimizer_of
    from runner.optim.operators import needed_operators, ready_operators

    device, operator = device_type(config), optimizer_of(config.optimizer).operator
    names = [operator] if operator is not None else []
    if config.zero.stage is not None:
        names += needed_operators(deepspeed_settings(config, accelerated=device == "cuda"))
    ready_operators(names, accelerator=device)


def check_elsewhere(config: RunConfig, *, place_is_made: bool = False) -> None:
    """Check a request that will run on other machines than this one; nothing is written.

    Those machines check themselves whether they meet the requirements of the request.

    Args:
        config: the resolved request.
        place_is_made: see :func:`prepare`.

    Raises:
        RequestError: the sections, the run directory or the plan have problems; the error contains all of them.
        DoesNotFitError: a rank would need more than ``memory_limit``.
    """
    from runner.launch.run.measured_plan import measured_plan
    from runner.model.check_pretrained import pretrained_problems
    from runner.profiling.meet import meet
    from runner.profiling.single_samples import try_single_samples
    from runner.training.first_batches import first_batches
    from runner.training.try_parts import try_parts

    place = [] if place_is_made else check_run_directory(config)
    raise_problems([*rules(config), *place, *callable_problems(config), *missing_for_plan(config).values()])
    raise_problems(pretrained_problems(config))
    first = first_batches(config)
    plan = measured_plan(config)
    if config.memory_limit is not None and not plan.fits:
        raise DoesNotFitError("\n".join(problem.line() for problem in plan.problems), plan.problems)
    meet(config, plan.profile, first.training, first.validation)
    try_single_samples(config, first.training, first.samples)
    try_parts(config, plan.profile, first.training)


def write_submitted(config: RunConfig, run_dir: Path, *, command: str) -> None:
    """Write the record of a request that waits for its machines."""
    (run_dir / "logs").mkdir(exist_ok=True)
    degrees = config.parallelism
    layout = {"pipeline": degrees.pipeline, "data": degrees.data, "tensor": degrees.tensor}
    layout["world_size"] = degrees.pipeline * degrees.data * degrees.tensor
    try:
        record = RunRecord.load(run_dir)  # the record of the run that this one continues, or of a sweep's job
    except (FileNotFoundError, ValueError):
        record = RunRecord()
    record.replace(
        **environment(),
        status="running",
        reason=None,
        command=command,
        config=to_container(config),
        fingerprint=fingerprint(config),
        layout=layout,
    ).save(run_dir)


def callable_problems(config: RunConfig) -> list[Problem]:
    """Problems with functions that are first called late, or by one rank only, found before the start."""
    from runner.optim.catalogue.registry import compression_of, optimizer_of, target_problems
    from runner.targets import import_target

    problems = [
        *target_problems(optimizer_of, config.optimizer),
        *target_problems(compression_of, config.compression),
    ]
    named = {f"metrics.{name}": target for name, target in config.metrics.items()}
    for path, target in {"logger.target": config.logger.target, "report": config.report, **named}.items():
        try:
            if target is not None:
                import_target(path, target)
        except RequestError as error:
            problems += error.problems
    if config.logger.kwargs or config.logger.target is not None:
        from runner.training.loggers import logger_problems

        with contextlib.suppress(RequestError):  # it is told above, or its package is not installed
            problems += logger_problems(config)
    if config.callbacks:
        from runner.training.users_callbacks import build_callbacks

        try:
            build_callbacks(config)
        except RequestError as error:
            problems += error.problems
    return problems


def place_of(plan: RunPlan) -> Callable[[int], str]:
    """Return a function from a global rank to a description of what it holds: ``stage 3, layers 12..15``.

    Where ranks divide layers, it says which part the rank has, and which ranks have the others and wait for it.
    """
    topology = plan.topology

    def place(rank: int) -> str:
        stages = topology.stages_of(rank)
        layers = _layers_of(plan, stages)
        for step, cut in plan.cuts[1:]:
            layers += f", after step {step} {_layers_of(cut, stages)}"
        told = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}, layers {layers}"
        if topology.num_shards == 1:
            return told
        at = topology.coordinates(rank)
        group = topology.tensor_group(at.pipe, at.data)
        return f"{told}, part {at.tensor} of those of ranks {', '.join(map(str, group))}"

    return place


def _layers_of(plan: RunPlan, stages: Collection[int]) -> str:
    return ", ".join("{}..{}".format(*plan.partition[stage]) for stage in stages)


def write_request(config: RunConfig, plan: RunPlan, run_dir: Path, *, command: str) -> Path:
    """Write what the ranks read, and return the path of the configuration file.

    The files are the configuration, the plan, the first record and, for people and recipes, the layer profile. Ranks
    plan nothing, so that neither measured times nor a machine with less memory can make them disagree. An existing
    record (of a resumed run or a job of a sweep) is cut back to the step from which the run continues.
    """
    from runner.plan.values import PLAN_FILE

    (run_dir / "logs").mkdir(exist_ok=True)
    ranks = range(plan.topology.world_size)
    remove_unfinished(run_dir / "logs", [error_file(run_dir, rank).name for rank in ranks])
    remove_unfinished(run_dir, [PROFILE_FILE, PLAN_FILE, CONFIG_FILE, RECORD_FILE, STEPS_FILE])
    write_atomically(run_dir / PROFILE_FILE, plan.profile.to_json())
    plan.save(run_dir)
    first_record(config, plan, run_dir, command=command).save(run_dir)
    return save(config, run_dir / CONFIG_FILE)


def first_record(config: RunConfig, plan: RunPlan, run_dir: Path, *, command: str) -> RunRecord:
    """The record before the first step: the request, the machine and the prediction."""
    try:
        before = RunRecord.load(run_dir)
    except (FileNotFoundError, ValueError):
        before = RunRecord()
    before = continue_record(before, config, run_dir)
    predicted = plan.to_json()
    seconds = before.step_seconds if before.steps else step_seconds([])
    return before.replace(
        **environment(),
        status="running",
        reason=None,
        command=command,
        config=to_container(config),
        fingerprint=fingerprint(config),
        layout=predicted["layout"],
        step_seconds=seconds | {"predicted": predicted["step_seconds"]},
        bubble_ratio=before.bubble_ratio | {"predicted": predicted["bubble_ratio"]},
        peak_memory_bytes=before.peak_memory_bytes | {"predicted": predicted["peak_memory_bytes"]},
        extras=before.extras | {key: predicted[key] for key in _PREDICTED},
    )
