"""Compares a run that met faults with the unbroken one: losses, validations, weights, states and logs, bit for bit."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from runner.checkpoint.file import checkpoint_files, read_checkpoint

__all__ = ["differences", "leftovers", "living", "record_of"]

_TIMES = ("seconds",)  # what no two runs have alike
_UNFINISHED = ".unfinished-"


def record_of(run_dir: Path) -> dict[str, Any]:
    """The record, or an empty one if there is none that can be read."""
    try:
        found: dict[str, Any] = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def differences(unbroken: Path, broken: Path, *, logs: bool = True) -> Iterator[str]:
    """A line for everything in which a complete run differs from the unbroken one.

    Args:
        logs: whether files of loggers are compared.
    """
    first, second = record_of(unbroken), record_of(broken)
    if second.get("status") != "ok":
        yield f"the record says {second.get('status')}: {second.get('reason')}"
        return
    for key in ("steps", "loss"):
        if first[key] != second[key]:
            yield f"{key} of the record: {_first_difference(first[key], second[key])}"
    yield from _validations(first["val_loss"], second["val_loss"])
    if _steps(unbroken) != _steps(broken):
        yield f"steps.jsonl: {_first_difference(_steps(unbroken), _steps(broken))}"
    if logs and _logged(unbroken) != _logged(broken):
        yield f"csv/metrics.csv: {_first_difference(_logged(unbroken), _logged(broken))}"
    yield from _tensors("weights", load_file(_weights(unbroken)), load_file(_weights(broken)))
    yield from _states(unbroken, broken)


def _validations(first: list[Any], second: list[Any]) -> Iterator[str]:
    """A run that was stopped in between has not more validations, because a stop brings none."""
    if first != second:
        yield f"val_loss of the record: {_first_difference(first, second)}"


def _states(unbroken: Path, broken: Path) -> Iterator[str]:
    """Of the newest checkpoint: weights, optimizer states and random states."""
    first, second = (list(checkpoint_files(each / "checkpoints").items())[-1] for each in (unbroken, broken))
    if first[0] != second[0]:
        yield f"the newest checkpoint is of step {second[0]}, not {first[0]}"
        return
    contents = [dict(_leaves(read_checkpoint(path))) for _, path in (first, second)]
    yield from _tensors("checkpoint", *contents)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from _leaves(each, f"{name}.{key}")
    elif not any(word in name for word in _NOT_COMPARED):
        yield name, value


_NOT_COMPARED = (".seconds", ".config", ".fingerprint", ".val_loss", ".loops", ".callbacks", ".arithmetic")


def _tensors(what: str, first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    if first.keys() != second.keys():
        yield f"{what}: other entries: {sorted(first.keys() ^ second.keys())[:3]}"
        return
    different = [name for name, value in first.items() if not _same(value, second[name])]
    if different:
        yield f"{what}: {len(different)} of {len(first)} entries differ, e.g. {different[0]}"


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    return bool(first == second)


def _steps(run_dir: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key in ("step", "loss")} for line in lines]


def _logged(run_dir: Path) -> list[Any]:
    """The rows of the CSV log, without columns of times; a step has its losses and its validation in several rows."""
    with (run_dir / "csv" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            (int(row["step"]), name, value)
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value and name != "step" and "loss" in name
        ]
    return sorted(rows)


def _weights(run_dir: Path) -> Path:
    return run_dir / "weights.safetensors"


def _first_difference(first: Any, second: Any) -> str:
    if not isinstance(first, list):
        return f"{second}, not {first}"
    if len(first) != len(second):
        return f"{len(second)} entries, not {len(first)}"
    index = next(index for index, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    return f"{second[index]}, not {first[index]} at {index}"


def leftovers(run_dir: Path) -> list[str]:
    """Files of a complete run that no run should leave."""
    found = [path for path in run_dir.rglob("*") if path.name.startswith((_UNFINISHED, ".")) and path.is_file()]
    found += [path for path in (run_dir / "run.lock",) if path.exists()]
    return [str(path.relative_to(run_dir)) for path in found]


def living(directory: Path) -> list[int]:
    """The processes that work in a directory: a command's, its ranks', theirs."""
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if _works_in(process, directory)]


def _works_in(process: Path, directory: Path) -> bool:
    try:
        is_own = process.name == str(os.getpid())
        is_dead = ") Z " in (process / "stat").read_text()
        return not is_own and not is_dead and (process / "cwd").readlink().is_relative_to(directory)
    except OSError:  # it ended meanwhile, or is another user's
        return False
