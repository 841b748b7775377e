"""The table of a sweep over compressors: bytes counted, by formula, and the loss after the same steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, log2, prod
from pathlib import Path
from statistics import fmean
from typing import Any

from runner.recipes.compression.figures import Curve, draw

__all__ = ["FORMULAS", "formula_bytes", "shapes_of", "sweep_report"]

_LAST_STEPS = 20  # their mean is the loss
Shapes = Sequence[tuple[int, ...]]
Keys = Mapping[str, Any]


def _elements(shapes: Shapes) -> int:
    return sum(map(prod, shapes))


def _largest(shapes: Shapes, keys: Keys) -> int:
    return sum(ceil(keys["density"] * prod(shape)) for shape in shapes)


def _low_rank(shapes: Shapes, keys: Keys, sent_factors: float) -> float:
    rank, total = keys["rank"], 0.0
    for shape in shapes:
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        smaller = rank * (rows + columns) < rows * columns if sent_factors == 1 else rank < min(rows, columns)
        total += sent_factors * rank * (rows + columns) if smaller else rows * columns
    return total


FORMULAS: Mapping[str, tuple[bool, Callable[[Shapes, Keys], float]]] = {
    "none": (True, lambda shapes, keys: 4 * _elements(shapes)),
    "fp16": (True, lambda shapes, keys: 2 * _elements(shapes)),
    "bf16": (True, lambda shapes, keys: 2 * _elements(shapes)),
    "topk": (False, lambda shapes, keys: 8 * _largest(shapes, keys)),
    "randomk": (True, lambda shapes, keys: 4 * _largest(shapes, keys)),
    "qsgd": (False, lambda shapes, keys: _elements(shapes) * ceil(log2(2 * keys["levels"] + 1)) / 8 + 4 * len(shapes)),
    "signsgd": (False, lambda shapes, keys: _elements(shapes) / 8 + 4 * len(shapes)),
    "powersgd": (True, lambda shapes, keys: 4 * _low_rank(shapes, keys, 1.0)),
    "gradzip": (True, lambda shapes, keys: 4 * _low_rank(shapes, keys, 0.5)),
}
"""Whether messages are summed over replicas in a ring (else each replica gets every other one's), and their bytes."""


def sweep_report(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table, for ``runner report``.

    Args:
        runs: of each job its ``directory`` and its ``record``.
    """
    ended = [run for run in runs if run["record"]["status"] == "ok"]
    whole = next((_sent(run["record"]) for run in ended if _keys(run["record"])["name"] == "none"), None)
    values = [_values(Path(run["directory"]), run["record"], whole) for run in ended]
    header: tuple[str, ...] = (
        "compression",
        "keys",
        "bytes counted",
        "of plain sums",
        "by formula",
        "counted/formula",
        "loss",
        "val",
    )
    notes = [
        "Bytes of gradients that all replicas send in a step, as the record counts them. The loss is the mean of the "
        f"last {_LAST_STEPS} steps; val is the last validation's.",
        *(f"{_keys(run['record'])['name']}: {run['record']['status']}" for run in runs if run not in ended),
    ]
    if any(run["record"]["config"].get("transport", {}).get("bytes_per_second") for run in ended):
        header = (*header, "seconds")
        values = [(*row, run["record"]["step_seconds"]["median"]) for row, run in zip(values, ended, strict=True)]
        notes.append("seconds: of a median step, on a link that is slowed down to transport.bytes_per_second")
    rows = [tuple(_cell(value) for value in row) for row in values]
    table = {"name": "compression", "title": "compressors of gradients", "header": header, "rows": rows}
    figure = partial(draw, curves=[Curve(_keys(run["record"])["name"], run["record"]["loss"]) for run in ended])
    file = f"losses{_suffix(runs)}.svg"
    return {"tables": [table | {"values": values, "notes": notes}], "figures": {file: figure}}


def formula_bytes(shapes: Shapes, keys: Keys, replicas: int) -> float:
    """What all replicas send in a mean step.

    Args:
        shapes: the shapes of the trained tensors.
        keys: the section ``compression`` of the request.
        replicas: the number of replicas.
    """
    summed, message = FORMULAS[keys["name"]]
    times = 2 * (replicas - 1) if summed else replicas * (replicas - 1)
    return times * message(shapes, keys)


def shapes_of(profile: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of a model's trained tensors, from a run's ``profile.json``; tied ones come once."""
    shapes = [tuple(shape) for layer in (*profile["layers"], profile["loss"]) for shape in layer["trained_shapes"]]
    for weight in profile["shared"]:
        for _ in weight["layers"][1:]:
            shapes.remove(tuple(weight["shape"]))
    return shapes


def _suffix(runs: Sequence[Mapping[str, Any]]) -> str:
    """What a recipe's name has after that of this one, so that each has its own figure on one page."""
    return str(runs[0]["record"]["config"].get("name", "")).removeprefix("compression") if runs else ""


def _keys(record: Mapping[str, Any]) -> dict[str, Any]:
    return dict(record["config"]["compression"])


def _sent(record: Mapping[str, Any]) -> float:
    return float(record["bytes_moved"]["weight_gradients"])


def _values(directory: Path, record: Mapping[str, Any], whole: float | None) -> tuple[Any, ...]:
    keys, sent = _keys(record), _sent(record)
    shapes = shapes_of(json.loads((directory / "profile.json").read_text(encoding="utf-8")))
    formula = formula_bytes(shapes, keys, record["layout"]["data"])
    said = " ".join(f"{key}={keys[key]}" for key in ("density", "levels", "rank") if keys[key] is not None)
    loss = fmean(record["loss"][-_LAST_STEPS:])
    val = record["val_loss"][-1][1] if record["val_loss"] else None
    return (keys["name"], said, sent, sent / whole if whole else None, formula, sent / formula, loss, val)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "-"
    return f"{value:,.0f}" if value > 1000 else f"{value:.4f}"
