"""The last lines of a run: how it ended, and where its files are."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from runner.config.perplexity import counts_tokens, perplexity
from runner.config.units import format_bytes, format_seconds
from runner.record import OTHER_WORK, REHEARSED_COMPUTE, RUN_SECONDS, RunRecord

__all__ = ["files", "other_times", "results"]

_NOT_TOLD = ("steps", "trace")  # files for programs; they lie beside the others
_NOTICEABLE = 0.1  # of the cores
_OFF = 0.1  # of a prediction, and of what was rehearsed
_PARTS = ("planning", "start", "rehearsal", "counted_steps", "steps", "validation", "saving", "report")


def results(record: RunRecord) -> list[str]:
    """The lines that say how a complete run ended, what its time went to, and what memory its processes had."""
    return [
        ", ".join([_steps(record.steps), *_losses(record)]),
        *_times(record),
        *other_times(record),
        *_processes(record),
    ]


def _times(record: RunRecord) -> Iterator[str]:
    """Yield the time of the whole command by its parts, each second once."""
    seconds = record.extras.get(RUN_SECONDS, {})
    spent = {part: seconds[part] for part in _PARTS if seconds.get(part)}
    if "start" not in spent:
        return
    counted, taken = seconds["num_counted"], seconds["num_steps"]
    if counted == taken and counted:  # what is between the steps belongs to them
        spent["counted_steps"] = spent.get("counted_steps", 0.0) + spent.pop("steps", 0.0)
    names = {"start": "start and end", "counted_steps": f"{_steps(counted)} that count memory"}
    names |= {"steps": _steps(taken - counted)}
    told = ", ".join(f"{names.get(part, part)} {format_seconds(value)}" for part, value in spent.items())
    yield f"{format_seconds(sum(spent.values()))} in all: {told}"


def other_times(record: RunRecord) -> Iterator[str]:
    """Yield why steps took another time than predicted, as far as a record of ranks on a machine's cores says it."""
    found = record.extras.get(OTHER_WORK, {})
    cores, count = found.get("cores", 0.0), found.get("of", 0)
    if record.peak_memory_bytes.get("kind") != "tensor_bytes" or not count:
        return
    if cores > _NOTICEABLE * count:
        yield f"other work had {cores:.1f} of {count} cores meanwhile: on a quiet machine times are shorter than these"
    else:
        yield from list(_unsteady(record)) or _parts(record)


def _unsteady(record: RunRecord) -> Iterator[str]:
    """Yield that a step was not as long as it was predicted because its forwards and backwards were not, either.

    If a prediction with their times of the run is wrong as well, there is nothing to say for it.
    """
    steps, compute = record.step_seconds, record.seconds.get("compute")
    predicted, rehearsed = steps.get("predicted"), record.extras.get(REHEARSED_COMPUTE)
    if not (predicted and rehearsed and compute and steps["median"]):
        return
    step, part = steps["median"] / predicted - 1, compute / rehearsed - 1
    left = (1 + step) / (1 + part) - 1
    if abs(step) > _OFF >= abs(left) and step * part > 0 and abs(part) > _OFF / 2:
        than = f"forwards and backwards took {1 + part:.2f} times what they took in the rehearsal"
        between = f"steps {format_seconds(steps['p10'])} to {format_seconds(steps['p90'])}"
        causes = "this machine's own speed has changed, or what a step computes"
        yield f"with no other work on these cores, {than}, {between}: {causes}"


def _parts(record: RunRecord) -> Iterator[str]:
    """Yield what a step was made of that was not as long as predicted, where nothing else says why."""
    steps, rehearsed = record.step_seconds, record.extras.get(REHEARSED_COMPUTE)
    median, predicted = steps.get("median"), steps.get("predicted")
    if not (median and predicted and rehearsed) or abs(predicted / median - 1) <= _OFF:
        return

    def took(*parts: str) -> str:
        return format_seconds(sum(record.seconds.get(part) or 0.0 for part in parts))

    yield (
        f"a step's {format_seconds(median)}: forwards and backwards {took('compute')} "
        f"({format_seconds(rehearsed)} in the rehearsal), messages, waiting and update "
        f"{took('communication', 'bubble', 'optimizer', 'offload')}, data, callbacks and the rest "
        f"{took('data', 'callbacks', 'rest')} (for all of these "
        f"{format_seconds(max(0.0, predicted - rehearsed))} were predicted)"
    )


def _steps(count: int) -> str:
    return f"{count} step{'s' if count != 1 else ''}"


def _processes(record: RunRecord) -> Iterator[str]:
    """Yield what a process has beside its tensors, which alone are predicted where there is no device."""
    memory = record.peak_memory_bytes
    processes = memory.get("process") or []
    if memory.get("kind") == "tensor_bytes" and processes:
        largest = format_bytes(max(processes))
        yield f"peak memory is that of tensors; the largest process had {largest}, with Python and its packages"


def files(record: RunRecord, run_dir: Path) -> list[str]:
    """The lines that say where the files of a complete run are.

    Args:
        run_dir: the run's directory as it is shown.
    """
    paths = {name: str(run_dir / path) for name, path in record.artifacts.items() if name not in _NOT_TOLD}
    rows = {name.replace("_", " "): path for name, path in paths.items()}
    rows["report"] = shlex.join(["runner", "report", str(run_dir)])
    width = max(map(len, rows))
    return [f"{name:{width}}  {path}" for name, path in rows.items()]


def _losses(record: RunRecord) -> Iterator[str]:
    if record.loss:
        yield f"loss {record.loss[-1]:.4f}"
    validations = [(loss, int(step)) for step, loss in record.val_loss if math.isfinite(loss)]
    if validations:
        loss, step = min(validations)
        name, tokens = record.config.get("loss", {}).get("name"), record.extras.get("tokens_per_second")
        means = f" (perplexity {perplexity(loss):.4g})" if counts_tokens(name, tokens) else ""
        yield f"best validation {loss:.4f}{means} after step {step}"
        for name, pairs in record.metrics.items():
            yield from (f"{name} {value:.4f}" for at, value in pairs if at == step)
