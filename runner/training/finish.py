"""Finishes a run: gathers what the ranks measured, and writes weights, pictures and the record."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors.torch import save_file
from torch import Tensor

from runner.checkpoint.durable import durably
from runner.config.compose.resolve import to_container
from runner.config.schema import RunConfig
from runner.config.units import format_seconds
from runner.model.ties import with_all_names
from runner.plan.values import RunPlan
from runner.pulse import Phase, Pulse
from runner.record import RUN_SECONDS, RunRecord, metric_extras, read_steps, step_seconds
from runner.strategy.pipeline import EngineStrategy
from runner.targets import import_target
from runner.training.averaging import WeightAveraging
from runner.training.callbacks import StepClock
from runner.training.checkpoints import Checkpoints
from runner.training.lightning_module import TrainedModule
from runner.training.loggers import PROFILER_FOLDER
from runner.training.measure.loop import remember_loop
from runner.training.measure.measures import (
    RankMeasures,
    compute_seconds,
    measured_bubble_ratio,
    seconds_of_median_step,
)
from runner.training.measure.spent import REPORT, SAVING, STEPS, Spent
from runner.training.measure.timelines import draw_timelines
from runner.training.samples import SAMPLES_FILE

__all__ = ["AVERAGE_FILE", "WEIGHTS_FILE", "Times", "finish"]

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "weights.safetensors"
AVERAGE_FILE = "averaged_weights.safetensors"
_PEAKS = {"measured": "peak_memory_bytes", "process": "process_bytes"}


@dataclass(frozen=True, slots=True)
class Times:
    """What has measured a run's time on this rank: each step, and what the run as a whole goes to."""

    clock: StepClock
    spent: Spent


def finish(
    trainer: pl.Trainer,
    module: TrainedModule,
    config: RunConfig,
    run_dir: Path,
    plan: RunPlan,
    times: Times,
    checkpoints: Checkpoints,
    average: WeightAveraging | None = None,
    *,
    stopped: bool = False,
    failed: Exception | None = None,
) -> None:
    """Finish the run; every rank calls this after the last step, and rank 0 writes.

    Args:
        stopped: whether a signal stopped the run before its last step.
        failed: an error after the last step, with which the run ends when everything is written.

    Raises:
        RunFailedError: weights or the last checkpoint could not be written.
        Exception: ``failed``.
    """
    failed, clock = failed or checkpoints.failed, times.clock
    times.spent.enter(SAVING)
    strategy = trainer.strategy
    assert isinstance(strategy, EngineStrategy)
    with strategy.patient(config.checkpoint.timeout_seconds):
        gathered = strategy.gather_objects(_own_measures(strategy, clock).to_plain())
        weights = with_all_names(strategy.lightning_module_state_dict(), module.ties)
        averages = average.whole(strategy) if average is not None else {}
    if gathered is None:
        if failed is not None:
            raise failed
        return
    measures = [RankMeasures.of_plain(each) for each in gathered]
    _save_weights(weights, run_dir / WEIGHTS_FILE)
    artifacts = {"weights": WEIGHTS_FILE, "steps": "steps.jsonl"}
    if averages:
        _save_weights(averages, run_dir / AVERAGE_FILE)
        artifacts["averaged_weights"] = AVERAGE_FILE
    if checkpoints.newest is not None and checkpoints.newest.exists():
        artifacts["checkpoint"] = str(checkpoints.newest.relative_to(run_dir))
    if checkpoints.best is not None:
        artifacts["best_checkpoint"] = str(checkpoints.best.relative_to(run_dir))
    for name in ("tensorboard", "csv", PROFILER_FOLDER):
        if (run_dir / name).is_dir():
            artifacts[name] = name
    if (run_dir / SAMPLES_FILE).is_file():
        artifacts["samples"] = SAMPLES_FILE
    assert strategy.meter is not None
    untimed = strategy.meter.untimed_steps(len(clock.walls))
    walls = {index: seconds for index, seconds in enumerate(clock.walls) if index not in untimed}
    artifacts |= _drawn(run_dir, plan, measures, walls)
    record = _measured(run_dir, strategy, module, config, plan, measures, walls)
    spent = _run_seconds(times, untimed)
    record = record.replace(artifacts=record.artifacts | artifacts, extras=record.extras | {RUN_SECONDS: spent})
    if checkpoints.missing:
        record = record.replace(extras=record.extras | {"not_saved": checkpoints.missing})
        logger.warning("the checkpoints are without %s", ", ".join(checkpoints.missing))
    if failed is not None:
        record.save(run_dir)
        raise failed
    if stopped:
        record.replace(status="interrupted", reason=f"stopped by a signal after step {record.steps}").save(run_dir)
        return
    record = record.replace(status="ok")
    record.save(run_dir)
    remember_loop(config, [clock.loops[index] for index in walls])
    Pulse.current().enter(Phase.DONE)
    _call_report(config, run_dir, weights, record, times.spent)


def _run_seconds(times: Times, counted: Sequence[int]) -> dict[str, float]:
    """What the run's time has gone to so far, the steps apart that count tensors and so are slower."""
    walls = times.clock.walls
    found = {"num_steps": len(walls), "num_counted": len(counted), **times.spent.seconds()}
    found["counted_steps"] = sum(walls[index] for index in counted)
    return found | {STEPS: max(0.0, found.get(STEPS, 0.0) - found["counted_steps"])}


def _process_bytes() -> int:
    """The most memory that this process has had, with Python, its packages and what an allocator keeps."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _drawn(
    run_dir: Path, plan: RunPlan, measures: Sequence[RankMeasures], walls: Mapping[int, float]
) -> dict[str, str]:
    """The pictures of the run; a run whose pictures fail is complete all the same."""
    try:
        return draw_timelines(run_dir, plan, measures, walls)
    except Exception as error:
        logger.warning("the timelines could not be drawn: %s: %s", type(error).__name__, error)
        return {}


def _save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights durably; a crash leaves no file that is cut short.

    Raises:
        RunFailedError: the file system refuses.
    """
    with durably(path) as temporary:
        save_file(_apart(weights), temporary)


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in the form that safetensors accepts: contiguous, with tied weights copied under each of their names."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone(memory_format=torch.contiguous_format) if place in seen else tensor.contiguous()
        seen.add(place)
    return apart


def _own_measures(strategy: EngineStrategy, clock: StepClock) -> RankMeasures:
    engine, meter = strategy.engine, strategy.meter
    assert engine is not None
    assert meter is not None
    steps = max(1, len(clock.walls))
    return RankMeasures(
        steps=tuple(engine.timeline.steps),
        events=dict(engine.timeline.events),
        replica=strategy.replica,
        peak_memory_bytes=meter.peak_bytes,
        bytes_per_step={kind: count / steps for kind, count in engine.bytes_sent.items()}
        | strategy.bytes_to_replicas(steps),
        state_bytes=strategy.held_bytes(),
        reserved_bytes=meter.reserved_bytes,
        process_bytes=_process_bytes(),
        walls=tuple(clock.walls),
        loads=tuple(clock.loads),
        calls=tuple(clock.calls),
    )


def _measured(
    run_dir: Path,
    strategy: EngineStrategy,
    module: TrainedModule,
    config: RunConfig,
    plan: RunPlan,
    measures: Sequence[RankMeasures],
    walls: Mapping[int, float],
) -> RunRecord:
    record, lines = RunRecord.load(run_dir), read_steps(run_dir)
    losses = [line["loss"] for line in lines]
    earlier = record.step_seconds["all"]  # from the run that this one continues
    seconds = step_seconds([*earlier, *walls.values()])
    predicted = {key: value for key, value in record.step_seconds.items() if key == "predicted"}
    median = seconds["median"]
    tokens = plan.work.tokens_per_second(median)
    timed = list(walls)
    assert strategy.meter is not None
    return record.replace(
        steps=len(losses),
        loss=losses,
        val_loss=module.val_losses,
        step_seconds=seconds | predicted,
        samples_per_second=config.data.batch_size / median if median else None,
        bubble_ratio=record.bubble_ratio | {"measured": measured_bubble_ratio(plan, measures, timed)},
        seconds=seconds_of_median_step(measures, timed, walls) or record.seconds,
        flops_per_step=plan.work.flops,
        mfu=plan.work.mfu(median),
        bytes_moved=_bytes_moved(measures),
        peak_memory_bytes=record.peak_memory_bytes | {"kind": strategy.meter.kind} | _peaks(measures),
        extras=record.extras
        | metric_extras(module.val_metrics)
        | ({"tokens_per_second": tokens} if tokens is not None else {})
        | _skipped(config, lines)
        | _moved(lines)
        | _slowest(measures, timed)
        | _states(record, plan, measures)
        | _reserved(measures),
    )


def _took_steps(measures: Sequence[RankMeasures]) -> bool:
    """Whether any step was taken; a run that is resumed after its last step holds no gradients."""
    return any(rank.steps for rank in measures)


def _peaks(measures: Sequence[RankMeasures]) -> dict[str, list[int]]:
    if not _took_steps(measures):
        return {}
    return {name: [getattr(rank, field) for rank in measures] for name, field in _PEAKS.items()}


def _slowest(measures: Sequence[RankMeasures], timed: Sequence[int]) -> dict[str, Any]:
    """The rank with the longest compute time, for which the others wait, and every rank's compute in a median step."""
    seconds = compute_seconds(measures, timed)
    if len(seconds) < 2 or min(seconds) <= 0:
        return {}
    slowest, mean = seconds.index(max(seconds)), sum(seconds) / len(seconds)
    ratio = seconds[slowest] / mean
    longest = format_seconds(max(seconds))
    logger.info("slowest rank: %d, %s of compute in a median step, %.2f times the mean", slowest, longest, ratio)
    return {"slowest_rank": {"rank": slowest, "of_mean": ratio, "compute_seconds": seconds}}


def _states(record: RunRecord, plan: RunPlan, measures: Sequence[RankMeasures]) -> dict[str, Any]:
    """Weights, gradients and optimizer states by global rank, predicted and counted from live tensors.

    Nothing if the run had already taken all its steps; the record then keeps the earlier values.
    """
    if not _took_steps(measures) and "state_bytes" in record.extras:
        return {}
    counted = [dict(rank.state_bytes) for rank in measures] if _took_steps(measures) else []
    return {"state_bytes": {"predicted": list(plan.state_bytes), "measured": counted}}


def _reserved(measures: Sequence[RankMeasures]) -> dict[str, Any]:
    """What each device's allocator reserved at its peak, by global rank."""
    measured = [rank.reserved_bytes for rank in measures]
    if not _took_steps(measures) or any(each is None for each in measured):
        return {}
    return {"reserved_bytes": {"measured": measured}}


def _skipped(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The steps (counted from 1) that changed no weight, and the final loss scale, for runs that may skip steps."""
    scales = [line["loss_scale"] for line in lines if "loss_scale" in line]
    if not scales and config.trainer.on_nonfinite != "skip":
        return {}
    skipped = {line["step"] for line in lines if line.get("skipped")}
    skipped |= {each["step"] for line in lines for each in line.get("taken_back", ()) if each["skipped"]}
    return {"skipped_steps": sorted(skipped)} | ({"loss_scale": scales[-1]} if scales else {})


def _moved(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The moves of layers between stages: after which step, which layers, their bytes and the seconds of the move."""
    moves = [{"after_step": line["step"] - 1, **line["layers_moved"]} for line in lines if "layers_moved" in line]
    return {"layer_moves": moves} if moves else {}


def _bytes_moved(measures: Sequence[RankMeasures]) -> dict[str, float]:
    """Bytes moved per step between ranks, and to the host's memory and back, summed over ranks."""

    def total(kind: str) -> float:
        return sum(rank.bytes_per_step[kind] for rank in measures)

    return {
        "activations": total("activation"),
        "activation_gradients": total("gradient"),
        "weights": total("weights"),
        "weight_gradients": total("weight_gradients"),
        "optimizer_states": total("optimizer_states"),
        "tensor": total("tensor"),
        "host_activations": total("host_activations"),
        "host_weights": total("host_weights"),
        "host_weight_gradients": total("host_weight_gradients"),
    }


def _call_report(config: RunConfig, run_dir: Path, weights: dict[str, Tensor], record: RunRecord, spent: Spent) -> None:
    """Call the recipe's own report function; the status of the run does not change if it fails."""
    if config.report is None:
        return
    spent.enter(REPORT)
    try:
        made: dict[str, Any] = import_target("report", config.report)(run_dir, weights, to_container(config))
        seconds = record.extras[RUN_SECONDS] | {REPORT: spent.seconds()[REPORT]}
        record.replace(artifacts=record.artifacts | made, extras=record.extras | {RUN_SECONDS: seconds}).save(run_dir)
    except Exception:
        logger.exception("the run is complete, but report = %s failed", config.report)
