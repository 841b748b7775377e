"""The files of a run: ``record.json``, and one line per optimizer step in ``steps.jsonl``.

``record.json`` is replaced as a whole by a rename, so a reader sees the old record or the new one, never a half-written
one. ``steps.jsonl`` grows by one flushed line per step, so a rank killed by SIGKILL loses nothing:
:func:`finish_failed` rebuilds the record of such a run from the two files.

JSON has no NaN and no infinity. They are written as ``null``, and the record's ``non_finite`` lists their places and
values: ``[[["loss", 3], "nan"], ...]``. Reading restores them.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from runner.environment import environment
from runner.files import write_atomically

__all__ = [
    "RECORD_FILE",
    "ASKED_WORDS",
    "FOUND_WORDS",
    "OTHER_WORK",
    "REHEARSED_COMPUTE",
    "RUN_SECONDS",
    "STEPS_FILE",
    "RunRecord",
    "Status",
    "StepLog",
    "environment",
    "finish_failed",
    "hang_file",
    "metric_extras",
    "read_steps",
    "step_seconds",
    "write_atomically",
]

RECORD_FILE = "record.json"
STEPS_FILE = "steps.jsonl"
RUN_SECONDS = "run_seconds"
"""Key in the extras: what the time of the last process of a run went to, each second once."""
ASKED_WORDS, FOUND_WORDS = "asked_words", "found_words"
"""Keys in the extras of a job whose layout is left to the runner: its request, and the one with the layout found."""
OTHER_WORK = "other_work"
"""Key in the extras: how many of this machine's cores other work had meanwhile."""
REHEARSED_COMPUTE = "rehearsed_compute_seconds"
"""Key in the extras: a rank's seconds of forwards and backwards in a step of the rehearsal, the mean over ranks."""

_OF_VALIDATION = "val_"  # prefix of the figures of validations

Status = Literal["waiting", "running", "ok", "failed", "out_of_memory", "unsupported", "preempted", "interrupted"]
"""``waiting`` is a job of a sweep that has not begun; it appears in reports but never in a record file."""


def _no_step_seconds() -> dict[str, Any]:
    return {"all": [], "median": None, "p10": None, "p90": None}


def _unknown(*keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. The fields are the keys of ``record.json``; None if a figure is not known (yet).

    Args:
        status: ``running`` until the run ends.
        reason: why the status is not ``ok``; else None.
        command: what the user typed.
        config: the resolved configuration, as plain containers.
        fingerprint: hash of the configuration; equal for two runs that must give the same numbers.
        layout: the degrees ``pipeline``, ``data``, ``tensor``, and ``world_size``.
        versions, hardware, commit: see :func:`runner.environment.environment`.
        steps: optimizer steps taken.
        loss: one number per optimizer step, the mean over the step's samples.
        val_loss: ``[step, value]`` pairs.
        step_seconds: see :func:`step_seconds`.
        samples_per_second: samples per second in a median step.
        bubble_ratio: ``predicted`` and ``measured``, idle / total rank time over the flushed span.
        seconds: parts of a median step, mean over ranks; they add up to the step. Its ``bubble`` is the time in which
            ranks wait for each other's tensors, a part of what ``bubble_ratio`` counts.
        flops_per_step: floating-point operations of one optimizer step over all ranks.
        mfu: FLOP/s divided by the machine's peak; None if the peak is not known.
        bytes_moved: per step, between ranks and to the host.
        peak_memory_bytes: ``predicted`` and ``measured`` by global rank, and the ``kind`` of measurement.
        artifacts: name to path, relative to the run directory.
        extras: any further top-level keys of the file.
    """

    status: Status = "running"
    reason: str | None = None
    command: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    layout: dict[str, int] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    commit: str | None = None
    steps: int = 0
    loss: list[float] = field(default_factory=list)
    val_loss: list[list[float]] = field(default_factory=list)
    step_seconds: dict[str, Any] = field(default_factory=_no_step_seconds)
    samples_per_second: float | None = None
    bubble_ratio: dict[str, Any] = field(default_factory=lambda: _unknown("predicted", "measured"))
    seconds: dict[str, Any] = field(
        default_factory=lambda: _unknown(
            *("data", "compute", "communication", "bubble", "optimizer", "offload", "callbacks", "rest")
        )
    )
    flops_per_step: float | None = None
    mfu: float | None = None
    bytes_moved: dict[str, Any] = field(
        default_factory=lambda: _unknown(
            *("activations", "activation_gradients", "weights", "weight_gradients", "optimizer_states"),
            *("tensor", "host_activations", "host_weights", "host_weight_gradients"),
        )
    )
    peak_memory_bytes: dict[str, Any] = field(
        default_factory=lambda: {"predicted": [], "measured": [], "kind": "tensor_bytes"}
    )
    artifacts: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document of ``record.json``, with ``extras`` at its top level; JSON can hold all of it.

        Raises:
            ValueError: an extra has the name of a field.
        """
        plain = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "extras"}
        shadowed = plain.keys() & self.extras.keys()
        if shadowed:
            raise ValueError(f"extras may not repeat the record's own fields: {sorted(shadowed)}")
        return _finite_document(plain | self.extras)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RunRecord:
        """The inverse of :meth:`to_json`; keys that are not fields become ``extras``."""
        document = _restored(document)
        names = {one.name for one in dataclasses.fields(cls)} - {"extras"}
        known = {key: value for key, value in document.items() if key in names}
        return cls(**known, extras={key: value for key, value in document.items() if key not in names})

    def save(self, run_dir: Path) -> Path:
        """Write ``<run_dir>/record.json`` atomically and return its path."""
        path = run_dir / RECORD_FILE
        write_atomically(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")
        return path

    @classmethod
    def load(cls, run_dir: Path) -> RunRecord:
        """Read ``<run_dir>/record.json``. Raises FileNotFoundError, or ValueError if it is not a record."""
        path = run_dir / RECORD_FILE
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or "status" not in document:
            raise ValueError(f"{path} is not the record of a run")
        return cls.from_json(document)

    def continued(
        self,
        loss: Sequence[float],
        seconds: Sequence[float],
        val_loss: Sequence[Sequence[float]],
        metrics: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> RunRecord:
        """The record of a run that continues after these steps; figures measured over all steps become unknown."""
        empty = RunRecord()
        return self.replace(
            steps=len(loss),
            loss=list(loss),
            val_loss=[list(pair) for pair in val_loss],
            step_seconds=step_seconds(seconds),
            samples_per_second=None,
            bubble_ratio=empty.bubble_ratio,
            seconds=empty.seconds,
            mfu=None,
            bytes_moved=empty.bytes_moved,
            peak_memory_bytes=empty.peak_memory_bytes,
            artifacts={},
            extras={key: value for key, value in self.extras.items() if key not in self.metrics}
            | metric_extras(metrics or {}),
        )

    @property
    def metrics(self) -> dict[str, list[list[float]]]:
        """The figures of validations besides the loss, ``val_NAME`` to ``[step, value]`` pairs."""
        return {key: value for key, value in self.extras.items() if key.startswith(_OF_VALIDATION)}

    def replace(self, **changes: Any) -> RunRecord:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


def metric_extras(metrics: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[list[float]]]:
    """The metrics of validations as a record's extras: ``[step, value]`` pairs by ``val_NAME``.

    Args:
        metrics: the pairs by name.
    """
    return {_OF_VALIDATION + name: [list(pair) for pair in pairs] for name, pairs in metrics.items()}


def step_seconds(all_seconds: Sequence[float], **extra: Any) -> dict[str, Any]:
    """Seconds of every optimizer step with their median and 10th and 90th percentile (None without steps)."""
    values = [float(value) for value in all_seconds]
    ordered = sorted(value for value in values if math.isfinite(value))
    summary = {
        "all": values,
        "median": statistics.median(ordered) if ordered else None,
        "p10": _percentile(ordered, 0.1),
        "p90": _percentile(ordered, 0.9),
    }
    return summary | extra


class StepLog:
    """Appends one line per optimizer step to ``<run_dir>/steps.jsonl``, flushed at once. One writer per run.

    Args:
        run_dir: an existing directory.
        start_step: the step that the run continues from; lines of later steps are cut first.
    """

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        path = run_dir / STEPS_FILE
        kept = [line for line in read_steps(run_dir) if line["step"] <= start_step]
        write_atomically(path, "".join(_line(one) for one in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, *, step: int, loss: float, seconds: float, **extra: Any) -> None:
        """Append optimizer step ``step`` (from 1): its mean loss, its seconds, and further values.

        Raises:
            OSError: the file cannot be written, or was removed: what is written to it is lost, without an error.
        """
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed during the run", self._file.name)
        self._file.write(_line({"step": step, "loss": loss, "seconds": seconds, **extra}))
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``steps.jsonl`` in order, up to the first that is no line of the step after the one before.

    That is a last line that is incomplete, or a line that was damaged.
    """
    path = run_dir / STEPS_FILE
    if not path.exists():
        return []
    steps: list[dict[str, Any]] = []
    for text in path.read_bytes().splitlines():
        try:
            line = _restored(json.loads(text))
        except (ValueError, TypeError, KeyError, IndexError):
            break
        if line.get("step") != len(steps) + 1 or not _is_number(line.get("loss"), line.get("seconds")):
            break
        steps.append(line)
    return steps


def _is_number(*values: object) -> bool:
    return all(isinstance(value, int | float) for value in values)


def finish_failed(run_dir: Path, status: Status, reason: str, **blank: Any) -> RunRecord:
    """Write the last record of a run that cannot do so itself, from its files; return what was saved.

    Args:
        run_dir: the run's directory.
        status: anything but ``ok``.
        reason: one line for the reader.
        blank: fields of the record if the run has not written one yet.
    """
    try:
        record = RunRecord.load(run_dir)
    except (FileNotFoundError, ValueError):
        record = RunRecord(**blank)
    steps = read_steps(run_dir)
    if len(steps) > record.steps:
        seconds = [one["seconds"] for one in steps]
        record = record.replace(
            steps=len(steps),
            loss=[one["loss"] for one in steps],
            step_seconds=record.step_seconds | step_seconds(seconds),
        )
    record = record.replace(status=status, reason=reason)
    record.save(run_dir)
    return record


def hang_file(run_dir: Path, rank: int) -> Path:
    """The file in which rank ``rank`` reports where it is stuck; its first line is the reason."""
    return run_dir / "logs" / f"rank_{rank}.hang.txt"


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(_finite_document(values), allow_nan=False) + "\n"


def _finite_document(values: Mapping[str, Any]) -> dict[str, Any]:
    found: list[list[Any]] = []
    document: dict[str, Any] = _without_non_finite(values, (), found)
    return document | {"non_finite": found} if found else document


def _restored(document: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`_finite_document`; its argument is not changed."""
    if "non_finite" not in document:
        return dict(document)
    copied: dict[str, Any] = json.loads(json.dumps(document))
    for keys, number in copied.pop("non_finite"):
        _put(copied, keys, float(number))
    return copied


def _without_non_finite(value: Any, keys: tuple[Any, ...], found: list[list[Any]]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_non_finite(item, (*keys, str(key)), found) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(item, (*keys, index), found) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        found.append([list(keys), str(value)])
        return None
    return value


def _put(document: Any, keys: Sequence[Any], value: float) -> None:
    for key in keys[:-1]:
        document = document[key]
    document[keys[-1]] = value


def _percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """The percentile of sorted values, linearly interpolated between the two nearest."""
    if not ordered:
        return None
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
