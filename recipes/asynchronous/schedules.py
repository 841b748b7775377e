"""Every asynchronous schedule beside 1F1B at equal samples, each as a run of the command ``runner train``."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.schedule.catalogue.registry import build
from runner.schedule.simulation.clock import Costs, simulate
from runner.schedule.steady import period

__all__ = [
    "RATES",
    "REQUESTS",
    "VARIANTS",
    "Request",
    "Result",
    "drawn",
    "momentum_rows",
    "predicted_time",
    "rows",
    "run",
    "state_bytes",
    "steps_late",
    "trained",
]

STAGES = 4
SAMPLES = 16  # per optimizer step of 1F1B
SMALL_STEPS = 4  # schedules with a step per micro-batch make so many more steps of fewer samples
_POINTS = 40  # of a loss curve

_MODEL = (
    "model=gpt", "model.kwargs.vocab_size=32", "model.kwargs.sequence_length=16", "model.kwargs.width=32",
    "model.kwargs.layers=8", "data.kwargs.vocab_size=32", "data.kwargs.sequence_length=16",
    "data.kwargs.samples=4096", "data.kwargs.val_samples=256", "partition=uniform", "device=cpu", "logger=none",
    "trainer.progress=false",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One schedule's request.

    Args:
        schedule: its name.
        microbatches: micro-batches per optimizer step.
        parts: how many optimizer steps take the samples of one step of 1F1B.
        more: further overrides.
        optimizer: overrides of the optimizer besides its rate; AdamW without any.
        rate: the learning rate.
        base: the request with which it is compared; None if it is one itself.
    """

    schedule: str
    microbatches: int
    parts: int = 1
    more: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    rate: float = 0.003
    base: str | None = "1f1b"


def _small(schedule: str) -> Request:
    return Request(schedule, 1, SMALL_STEPS, base="1f1b, small steps")


REQUESTS: dict[str, Request] = {
    "1f1b": Request("1f1b", 4, base=None),
    "1f1b, small steps": Request("1f1b", 1, SMALL_STEPS),
    "pipedream": _small("pipedream"),
    "pipedream_vsync": _small("pipedream_vsync"),
    "pipedream_2bw": Request("pipedream_2bw", 4),
    "wpipe": Request("wpipe", 6),
    "ampnet": _small("ampnet"),
    "spectrain": Request("spectrain", 1, SMALL_STEPS, ("weight_prediction=adam",), base="1f1b, small steps"),
    "xpipe": Request("xpipe", 4),
    "pipemare": _small("pipemare"),
    "avgpipe": Request("avgpipe", 4),
    "hetpipe": _small("hetpipe"),
}
"""With AdamW; schedules whose paper has one micro-batch per step make more and smaller steps."""

RATES = (0.03, 0.1, 0.3)
"""The rates of SGD with momentum, which sets them apart more than AdamW does."""

_OFF = "schedule.{}=null"
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "1f1b": ("1f1b", ()),
    "pipedream": ("pipedream", ()),
    "spectrain": ("spectrain", ()),
    "ampnet": ("ampnet", ()),
    "pipemare": ("pipemare", ()),
    "pipemare without rescheduling": ("pipemare", (_OFF.format("lr_rescheduling"),)),
    "pipemare without correction": ("pipemare", (_OFF.format("discrepancy_correction"),)),
}
"""With SGD and momentum 0.9, one micro-batch per step: label -> schedule and overrides."""


def _with_momentum() -> Iterator[tuple[str, Request]]:
    for rate in RATES:
        for label, (schedule, more) in VARIANTS.items():
            optimizer, base = ("optimizer=sgd", "optimizer.momentum=0.9"), f"1f1b, SGD {rate:g}"
            name = f"{label}, SGD {rate:g}"
            yield name, Request(schedule, 1, SMALL_STEPS, more, optimizer, rate, base if name != base else None)


REQUESTS |= dict(_with_momentum())


@dataclass(frozen=True)
class Result:
    """What one run has recorded.

    Args:
        label, schedule, optimizer, rate, base: what was run, and with what it is compared.
        steps, samples: optimizer steps, and the samples of all of them.
        loss: mean training loss over the last tenth of the steps; None if it became infinite.
        val_loss: loss over the validation set after the last step; None likewise.
        versions: the most copies of its weights that a rank holds, in shares of a rank.
        late: for each stage, the most optimizer steps that the weights of a forward lack.
        weight_bytes: bytes of weights and their copies on the fullest rank: predicted, and counted between two steps.
        peak_bytes: the fullest rank's memory at its peak: predicted, and counted.
        curve: samples seen, and the mean loss around there.
    """

    label: str
    schedule: str
    optimizer: str
    rate: float
    base: str | None
    steps: int
    samples: int
    loss: float | None
    val_loss: float | None
    versions: float
    late: Sequence[int]
    weight_bytes: Sequence[int]
    peak_bytes: Sequence[int]
    curve: Sequence[Sequence[float]]


def run(label: str, steps: int, directory: Path) -> Result:
    """Train with one of :data:`REQUESTS` for as many samples as ``steps`` steps of 1F1B take.

    Args:
        label: the request.
        steps: steps of 1F1B.
        directory: a folder for the runs.
    """
    asked = REQUESTS[label]
    made, place = steps * asked.parts, directory / label.replace(", ", "-").replace(" ", "-")
    samples = SAMPLES // asked.parts
    words = [
        *_MODEL, f"schedule={asked.schedule}", f"parallelism.pipeline={STAGES}",
        f"schedule.microbatches={asked.microbatches}", *asked.more, *asked.optimizer, f"optimizer.lr={asked.rate}",
        f"trainer.max_steps={made}", f"trainer.val_every={made}", f"data.batch_size={samples}", f"run_dir={place}",
    ]  # fmt: skip
    record = trained(words, place)
    order = drawn(words)
    losses = [loss for loss in record["loss"] if loss is not None and math.isfinite(loss)]
    ended = record["status"] == "ok" and len(losses) == made
    tail = losses[-max(1, made // 10) :]
    peaks = record["peak_memory_bytes"]
    return Result(
        label=label,
        schedule=asked.schedule,
        optimizer=record["config"]["optimizer"]["name"],
        rate=asked.rate,
        base=asked.base,
        steps=record["steps"],
        samples=record["steps"] * samples,
        loss=sum(tail) / len(tail) if ended else None,
        val_loss=record["val_loss"][-1][1] if ended else None,
        versions=max(order["weight_versions"]),
        late=steps_late(order),
        weight_bytes=[max(each["weights"] for each in of) if of else 0 for of in state_bytes(record)],
        peak_bytes=[max(peaks["predicted"]), max(peaks["measured"] or [0])],
        curve=_curve(losses, samples),
    )


def trained(words: list[str], directory: Path) -> dict[str, Any]:
    """The record of a run, which may have stopped because its loss was not finite."""
    done = _command("train", *words)
    path = directory / "record.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if done.returncode and "finite" not in str(record.get("reason")):
        raise RuntimeError(done.stderr)
    return record


def drawn(words: list[str]) -> dict[str, Any]:
    """What ``runner schedule --json`` says of the schedule that these overrides ask for."""
    asked = [word for word in words if word.startswith(("schedule=", "schedule.", "parallelism."))]
    described: dict[str, Any] = json.loads(_command("schedule", *asked, "--json").stdout)
    return described


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "runner", *words], env=environment, capture_output=True, text=True)


def state_bytes(record: dict[str, Any]) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Bytes of what each rank holds between two steps: predicted, and counted."""
    found = record.get("state_bytes", {})
    return found.get("predicted", []), found.get("measured", [])


def steps_late(drawn: dict[str, Any]) -> list[int]:
    """For each stage, the optimizer steps that are made between a forward's weights and its own step, at most."""
    windows = max((window for rank in drawn["updates"] for _, window, _ in rank), default=0) + 1
    per_window = -(-drawn["microbatches"] // windows)
    read = drawn["versions"]["F"]
    return [max(m // per_window - row[stage] for m, row in enumerate(read)) for stage in range(drawn["stages"])]


def _curve(losses: Sequence[float], samples: int) -> list[list[float]]:
    """The losses' means over so many equal parts, each with the samples that were seen until its middle."""
    width = max(1, len(losses) // _POINTS)
    parts = [losses[at : at + width] for at in range(0, len(losses) - width + 1, width)]
    return [[samples * width * (number + 0.5), round(sum(part) / width, 4)] for number, part in enumerate(parts)]


def rows(results: Sequence[Result]) -> Iterator[list[str]]:
    """The table of all schedules with AdamW; each is compared with 1F1B at the same size of a step."""
    found = {each.label: each for each in results}
    for each in results:
        if "SGD" in each.label:
            continue
        losses = [_number(each.loss), _number(each.val_loss), _difference(each, found.get(each.base or ""))]
        losses += _at_equal_time(each, [found[name] for name in ("1f1b", "1f1b, small steps") if name in found])
        copies = [f"{each.versions:g}", " ".join(map(str, each.late))]
        states = [f"{count:,}" for count in (*each.weight_bytes, *each.peak_bytes)]
        name, more = each.schedule, each.label.removeprefix(each.schedule)
        yield [f"`{name}`{more}", str(each.steps), *losses, *copies, *states]


def predicted_time(label: str, samples: float) -> float:
    """What so many samples take by the simulator's clock, in forwards of a quarter of 1F1B's step on one rank.

    A backward takes two forwards, messages and updates take no time, and the fill of an asynchronous pipeline is left
    out.
    """
    asked = REQUESTS[label]
    schedule = build(asked.schedule, ranks=STAGES, microbatches=asked.microbatches)
    step = period(schedule, Costs()) if schedule.is_asynchronous else simulate(schedule, Costs()).makespan
    size = SAMPLES // asked.parts
    return samples / size * step * (size / asked.microbatches) / (SAMPLES / SMALL_STEPS)


def _at_equal_time(one: Result, bases: Sequence[Result]) -> list[str]:
    """The time of all samples over 1F1B's, and the best training loss that a 1F1B has had after as much time."""
    if not bases:
        return ["", ""]
    own = predicted_time(one.label, one.samples)
    ratio = own / predicted_time(bases[0].label, bases[0].samples)
    losses = [_loss_after(base, own / predicted_time(base.label, 1.0)) for base in bases if base is not one]
    best = min((loss for loss in losses if loss is not None), default=None)
    return [f"{ratio:.2f}", "" if one in bases or best is None else f"{best:.3f}"]


def _loss_after(base: Result, samples: float) -> float | None:
    """The mean loss over the last tenth of so many samples; None if the run was shorter or has no point there."""
    if samples > base.samples:
        return base.loss
    near = [loss for seen, loss in base.curve if 0.9 * samples <= seen <= samples]
    return sum(near) / len(near) if near else None


def momentum_rows(results: Sequence[Result]) -> Iterator[list[str]]:
    """The table of validation losses with SGD and momentum: a line for each variant, a column for each rate."""
    found = {each.label: each for each in results}
    for label in VARIANTS:
        schedule, _, how = label.partition(" ")
        cells = (found.get(f"{label}, SGD {rate:g}") for rate in RATES)
        yield [f"`{schedule}` {how}".strip(), *(_number(each.val_loss) if each else "not measured" for each in cells)]


def _number(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"


def _difference(one: Result, base: Result | None) -> str:
    if base is None or one.val_loss is None or base.val_loss is None:
        return ""
    return f"{one.val_loss - base.val_loss:+.3f}"
