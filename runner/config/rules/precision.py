"""Rules of ``precision``: the loss scale, for the formats that need one, and what has no 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable

from runner.config.precision import PRECISIONS
from runner.config.rules.table import Row, Table, value_at
from runner.config.rules.values import at_least, positive
from runner.config.schema import PrecisionConfig, RunConfig
from runner.optim.catalogue.registry import find_optimizer

__all__ = ["PRECISION_TABLES"]

_DEFAULT = PrecisionConfig()
_SCALED = tuple(name for name, known in PRECISIONS.items() if known.loss_scaling)


def _is_not_scaled(config: RunConfig) -> bool:
    return config.precision.name in PRECISIONS and config.precision.name not in _SCALED


def _of_scaling(key: str) -> Row[RunConfig]:
    path, unset = f"precision.{key}", getattr(_DEFAULT, key)
    return Row(
        path,
        lambda c: bool(value_at(c, path) != unset),
        f"belongs to {' and '.join(_SCALED)}",
        "The precision {precision.name} has the range of fp32, so that its loss is not scaled",
        fix="precision=fp16",
    )


def _has_fewer_bits(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is not None and bool(kind.state_bytes or kind.operator or kind.compresses or kind.watch)


def _needs(path: str, breaks: Callable[[RunConfig], bool], rule: str, why: str, fix: str) -> Row[RunConfig]:
    return Row(path, breaks, f"{rule} with precision=fp64", why, fix=fix)


_DOUBLE: Table[RunConfig] = Table(
    "Precision of 64 bits",
    (
        _needs("zero.stage", lambda c: c.zero.stage is not None, "must be null", "DeepSpeed has no fp64", "zero=none"),
        _needs(
            "compression.name",
            lambda c: c.compression.name != "none",
            "must be none",
            "What compression leaves out is kept in fp32",
            "compression=none",
        ),
        _needs(
            "optimizer.name",
            _has_fewer_bits,
            "must be another",
            "{optimizer.name} computes, or keeps its states, in 32 bits or fewer",
            "optimizer=adamw",
        ),
        _needs(
            "trainer.ema_decay",
            lambda c: c.trainer.ema_decay is not None,
            "must be null",
            "The average of the weights is kept in fp32",
            "trainer.ema_decay=null",
        ),
        _needs(
            "approximate_backward.name",
            lambda c: c.approximate_backward.name != "none",
            "must be none",
            "Approximated gradients are not shown to be right in fp64",
            "approximate_backward=none",
        ),
    ),
    applies=lambda c: c.precision.name == "fp64",
)

_KEYS = ("initial_scale", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale")
_WITHOUT: Table[RunConfig] = Table(
    "Precisions without a scale of the loss", tuple(map(_of_scaling, _KEYS)), applies=_is_not_scaled
)
_WITH: Table[RunConfig] = Table(
    "Precisions with a scale of the loss",
    (
        positive("precision.initial_scale", "65536"),
        positive("precision.minimum_scale", "1e-7"),
        at_least("precision.growth_interval", 1),
        Row(
            "precision.growth_factor",
            lambda c: not 1 <= c.precision.growth_factor < math.inf,
            "must be a finite number, 1 or above",
            fix="precision.growth_factor=2",
        ),
        Row(
            "precision.backoff_factor",
            lambda c: not 0 < c.precision.backoff_factor < 1,
            "must lie in (0, 1)",
            fix="precision.backoff_factor=0.5",
        ),
        Row(
            "precision.minimum_scale",
            lambda c: c.precision.minimum_scale > c.precision.initial_scale > 0,
            "must be at most precision.initial_scale",
            "The scale starts at precision.initial_scale = {precision.initial_scale}",
            fix="precision.minimum_scale={precision.initial_scale}",
        ),
    ),
    applies=lambda c: c.precision.name in _SCALED,
)

PRECISION_TABLES = (_WITHOUT, _WITH, _DOUBLE)
"""The tables of this file; exactly one of the first two applies to a known precision."""
