"""Trains a few steps in a layout and in one process, with real ranks, and compares the results."""

from __future__ import annotations

import logging
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.schema import CheckpointConfig, LoggerConfig, ProfilerConfig, RunConfig
from runner.errors import (
    EXIT_DOES_NOT_FIT,
    EXIT_OK,
    EXIT_WRONG_REQUEST,
    DoesNotFitError,
    Problem,
    RequestError,
    RunFailedError,
    raise_problems,
)
from runner.launch.local.ranks import Launch, Outcome, run_ranks
from runner.launch.rank import uses_cuda
from runner.launch.run.prepare import place_of, prepare, tell_plan, write_request
from runner.plan.part_notes import draw_problem
from runner.plan.requested_schedule import executed_schedule, is_chosen_by_plan

if TYPE_CHECKING:
    from runner.plan.values import RunPlan
    from runner.training.verify.compare import Comparison, Promise

__all__ = ["DEFAULT_STEPS", "RECORDING_ENTRY", "verify"]

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 4
RECORDING_ENTRY = "runner.training.verify.recording_rank:run_recording_rank"
_REFERENCE_ENTRY = "runner.training.verify.reference:run_reference"
_DIVIDED_ENTRY = "runner.training.verify.reference:run_divided_reference"
_OF_PARTS = "the parts in one process"
_MOST_EXACT_REPLICAS = 2  # a + b = b + a, but the sum of three or more terms depends on their order


def verify(config: RunConfig, *, steps: int = DEFAULT_STEPS, entry: str = RECORDING_ENTRY) -> Comparison | int:
    """Compare the layout of a request with one process.

    Args:
        config: the resolved request; its settings for output and checkpoints are ignored.
        steps: number of optimizer steps of each run.
        entry: ``module:function`` that each rank of the layout runs.

    Returns:
        the comparison, or the exit status of an interruption.

    Raises:
        RequestError, DoesNotFitError: the request could not be trained either.
        RunFailedError: a rank failed.
    """
    from runner.training.verify.compare import compare_runs

    if config.launcher.name != "local":
        why = "`runner verify` starts both runs on this machine"
        raise_problems([Problem("launcher", config.launcher.name, "must be local", why, "launcher=local")])
    if config.parallelism.data > 1 and not is_chosen_by_plan(config) and executed_schedule(config).wave:
        why = "The plain loop has the weights of one worker"
        raise_problems([Problem("parallelism.data", config.parallelism.data, "must be 1", why, "parallelism.data=1")])
    if config.compression.name != "none":
        why = "One process sums whole gradients, from which compressed ones differ by what is left over"
        raise_problems([Problem("compression", config.compression.name, "must be none here", why, "compression=none")])
    last = max(config.partition.migrate or {}, default=0)
    if last >= steps:
        why = f"Layers move after step {last}, and what follows is compared, too"
        raise_problems([Problem("--steps", steps, f"must be above {last}", why, f"--steps {last + 1}")])
    _refuse_own_scheduler(config)
    config = _short(config, steps)
    plan = prepare(config, place_is_made=True)
    tell_plan(plan, about=("cores",))
    _refuse_own_draws(config, plan)
    place = Path(tempfile.mkdtemp(prefix="runner-verify-"))
    runs = {"layout": (plan.topology.world_size, entry), "one process": (1, _REFERENCE_ENTRY)}
    if config.parallelism.tensor > 1 and _is_exact(config, plan) and config.parallelism.tensor_sums != "native":
        runs[_OF_PARTS] = (1, _DIVIDED_ENTRY)
    directories: list[Path] = []
    for name, (world_size, each) in runs.items():
        logger.info("%d steps: %s", steps, name)
        directory = place / name.replace(" ", "_")
        directory.mkdir()
        directories.append(directory)
        outcome = _run(config, plan, directory, world_size, each)
        if outcome.status in ("interrupted", "preempted"):
            shutil.rmtree(place)
            return outcome.exit_status
        if outcome.exit_status != EXIT_OK:
            _raise(outcome, place)
    seen = config.zero.stage is None and not config.schedule.post_validation

    def sized(found: Comparison) -> Comparison:
        return replace(found, parameters=plan.profile.num_parameters, trained_parameters=plan.profile.num_trained)

    comparison = sized(compare_runs(directories[0], directories[1], _promise(config, plan), with_gradients=seen))
    if _OF_PARTS in runs:
        of_parts = sized(compare_runs(directories[0], directories[2], "bitwise", with_gradients=seen))
        comparison = replace(comparison, equal=comparison.equal and of_parts.equal, of_parts=of_parts)
    shutil.rmtree(place)
    return comparison


def _refuse_own_draws(config: RunConfig, plan: RunPlan) -> None:
    """Refuse layers in which each rank draws random numbers for its part: one process draws others.

    Raises:
        RequestError: there is such a layer.
    """
    why = draw_problem(plan.profile)
    if why is not None:
        rule = "must draw what one process draws, to be verified"
        raise RequestError([Problem("parallelism.tensor", config.parallelism.tensor, rule, f"{why}; set it to 0")])


def _refuse_own_scheduler(config: RunConfig) -> None:
    """Refuse a LightningModule's own scheduler before the layout is trained, which can take long.

    Raises:
        RequestError: ``configure_optimizers`` returns more than an optimizer.
    """
    if config.optimizer.name != "auto":
        return
    from runner.model.apart import ApartError, apart

    with suppress(ApartError):  # it may need a Trainer or real tensors; the plain loop looks again
        apart(_make_own_optimizer, config)


def _make_own_optimizer(config: RunConfig) -> None:
    from runner.model.fake import fake_tensors
    from runner.model.load import load_model
    from runner.training.lightning_module import own_optimizer

    with fake_tensors():
        module = load_model(config, cut=False).module
        if module is not None:
            own_optimizer(module, config.model.target)


def _short(config: RunConfig, steps: int) -> RunConfig:
    """The request limited to ``steps`` steps, with the learning rates of the whole run."""
    from runner.model.epochs import count_epoch_samples, in_steps

    if config.trainer.max_epochs is not None:
        config = in_steps(config, count_epoch_samples(config))
    scheduler = config.lr_scheduler
    if scheduler.name != "constant" and scheduler.total_steps is None:
        scheduler = replace(scheduler, total_steps=config.trainer.max_steps)
    return replace(
        config,
        run_dir=None,
        resume=None,
        report=None,
        lr_scheduler=scheduler,
        trainer=replace(config.trainer, max_steps=steps, max_epochs=None, val_every=None, progress=False),
        checkpoint=CheckpointConfig(),
        logger=LoggerConfig(name="none"),
        profiler=ProfilerConfig(),
        metrics={},
        callbacks={},
    )


def _run(config: RunConfig, plan: RunPlan, directory: Path, world_size: int, entry: str) -> Outcome:
    config_file = write_request(replace(config, run_dir=str(directory)), plan, directory, command="runner verify")
    launch = Launch(
        config_file, directory, world_size, config.trainer.threads, place_of(plan), entry=entry, to_stderr=True
    )
    return run_ranks(launch)


def _promise(config: RunConfig, plan: RunPlan) -> Promise:
    """``bitwise`` where every sum has one order, else ``rounding``: layers that ranks divide add parts of products."""
    return "bitwise" if config.parallelism.tensor == 1 and _is_exact(config, plan) else "rounding"


def _is_exact(config: RunConfig, plan: RunPlan) -> bool:
    """Whether every sum has one order but for those of parts of products.

    This needs the CPU, one thread, at most two replicas without ZeRO sharding, micro-batches that are added in order,
    and no tied weight whose gradients several stages add.
    """
    alone = config.parallelism.data <= _MOST_EXACT_REPLICAS and not config.zero.stage
    exact = not uses_cuda(config) and config.trainer.threads == 1 and alone
    return exact and plan.schedule.sums_in_order and not _ties_cross(config, plan)


def _ties_cross(config: RunConfig, plan: RunPlan) -> bool:
    """Whether a weight is shared by layers of several stages."""
    from runner.model.load import model_layers
    from runner.model.ties import crossing_ties, find_ties

    if plan.schedule.stages == 1:
        return False
    return bool(crossing_ties(find_ties(model_layers(config, plan.profile.divided_logits)), plan.partition))


def _raise(outcome: Outcome, place: Path) -> None:
    message = "\n".join(outcome.lines)
    if outcome.exit_status == EXIT_WRONG_REQUEST:
        shutil.rmtree(place)
        raise _Told(message)
    if outcome.exit_status == EXIT_DOES_NOT_FIT:
        shutil.rmtree(place)
        raise DoesNotFitError(message)
    raise RunFailedError(f"the files of the run are kept in {place}\n{message}")


class _Told(RequestError):
    """A request that a rank refused, with the rank's own message."""

    def __init__(self, message: str) -> None:
        super().__init__([Problem("request", "", message)])
        self.args = (message,)
