"""Rules of ``approximate_backward``: its keys, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.config.approximations import APPROXIMATIONS
from runner.config.precision import PRECISIONS
from runner.config.rules.table import Row, Table, value_at
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import find_optimizer

__all__ = ["APPROXIMATION_TABLES"]


def _key(key: str, example: str, fits: Callable[[Any], bool], rule: str) -> tuple[Row[RunConfig], ...]:
    """The rules that a key is given where it is read, and nowhere else, and that its value fits."""
    path, owners = f"approximate_backward.{key}", [name for name, keys in APPROXIMATIONS.items() if key in keys]

    def reads(config: RunConfig) -> bool:
        return config.approximate_backward.name in owners

    return (
        Row(
            path,
            lambda c: value_at(c, path) is not None and not reads(c),
            f"belongs to approximate_backward={' or '.join(owners)}",
            fix=f"{path}=null",
        ),
        Row(path, lambda c: value_at(c, path) is None, "must be given", fix=f"{path}={example}", when=reads),
        Row(
            path,
            lambda c: value_at(c, path) is not None and not fits(value_at(c, path)),
            rule,
            fix=f"{path}={example}",
            when=reads,
        ),
    )


def _sees_layers(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is not None and kind.watch is not None


def _has_four_bits(config: RunConfig) -> bool:
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.four_bits


_KEYS: Table[RunConfig] = Table(
    "Approximate backwards",
    (
        *_key("bits", "3", lambda bits: 1 <= bits <= 4, "must be from 1 to 4"),
        *_key("ratio", "0.5", lambda ratio: 0 < ratio < 1, "must lie between 0 and 1"),
    ),
)
_SURROUNDINGS: Table[RunConfig] = Table(
    "What approximates no backward",
    (
        Row(
            "compile",
            lambda c: c.compile,
            "must be false with approximate_backward={approximate_backward.name}",
            "Functions are recognised where they are called, which a compiled layer no longer does",
            fix="compile=false",
        ),
        Row(
            "optimizer.name",
            lambda c: _sees_layers(c) and "ratio" in APPROXIMATIONS[c.approximate_backward.name],
            "must be another with approximate_backward={approximate_backward.name}",
            "Its factors come from whole inputs of linear layers, of which only rows are kept",
            fix="optimizer=adamw",
        ),
        Row(
            "precision.name",
            lambda c: _has_four_bits(c) and "ratio" in APPROXIMATIONS[c.approximate_backward.name],
            "must be another with approximate_backward={approximate_backward.name}",
            "Both replace the backward of linear maps",
            fix="precision=fp32",
        ),
    ),
    applies=lambda c: c.approximate_backward.name in APPROXIMATIONS and c.approximate_backward.name != "none",
)

_FOUR_BITS: Table[RunConfig] = Table(
    "Linear maps with numbers of four bits",
    (
        Row(
            "compile",
            lambda c: c.compile,
            "must be false with precision={precision.name}",
            "Linear maps are recognised where they are called, which a compiled layer no longer does",
            fix="compile=false",
        ),
    ),
    applies=_has_four_bits,
)

APPROXIMATION_TABLES: tuple[Table[RunConfig], ...] = (_KEYS, _SURROUNDINGS, _FOUR_BITS)
"""All tables of this file, in the order in which they are checked."""
