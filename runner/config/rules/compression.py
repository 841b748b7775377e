"""Rules of the compression of gradients: settings that fit no compressor, and the rules of each compressor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from runner.config.compose.shape import check_value
from runner.config.precision import PRECISIONS
from runner.config.rules.table import Computed, Row, Table
from runner.config.rules.values import at_least
from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean
from runner.optim.catalogue.compression import CompressionKind
from runner.optim.catalogue.registry import COMPRESSORS, find_compression, find_optimizer

__all__ = ["COMPRESSION_TABLES"]

_MOST_LEVELS = (1 << 15) - 1


def _compresses(config: RunConfig) -> bool:
    return config.compression.name != "none" and find_compression(config.compression) is not None


def _compresses_momentum(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is not None and kind.compresses


def _scales_losses(config: RunConfig) -> bool:
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.loss_scaling


def _gradients_are_halves(config: RunConfig) -> bool:
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.weights != "float32"


def _is(condition: Callable[[CompressionKind], bool]) -> Callable[[RunConfig], bool]:
    """Whether the request's compressor is known and meets the condition."""

    def holds(config: RunConfig) -> bool:
        kind = find_compression(config.compression)
        return kind is not None and condition(kind)

    return holds


def _needed(
    key: str, example: str, fits: Callable[[Any], bool], rule: str
) -> tuple[Row[RunConfig], Row[RunConfig], Row[RunConfig]]:
    """The rules that a key is set where the compressor reads it, fits, and is not set anywhere else."""
    path, owners = f"compression.{key}", [kind.name for kind in COMPRESSORS.values() if key in kind.reads]

    def value(config: RunConfig) -> Any:
        return getattr(config.compression, key)

    reads = _is(lambda kind: key in kind.reads)
    return (
        Row(
            path,
            lambda c: value(c) is not None,
            f"belongs to compression={' or '.join(owners)}",
            "It has no meaning for {compression.name}",
            fix=f"{path}=null",
            when=_is(lambda kind: key not in kind.reads),
        ),
        Row(
            path,
            lambda c: value(c) is None,
            "must be given",
            "{compression.name} has no default for it outside of its option file",
            fix=f"{path}={example}",
            when=reads,
        ),
        Row(path, lambda c: value(c) is not None and not fits(value(c)), rule, fix=f"{path}={example}", when=reads),
    )


def _unknown_keys(config: RunConfig) -> Iterator[Problem]:
    section, kind = config.compression, find_compression(config.compression)
    if kind is None or kind.keys is None:
        return
    for key, value in section.kwargs.items():
        if key not in kind.keys:
            near = did_you_mean(key, kind.keys)
            why = f"{section.name} has {', '.join(kind.keys) or 'no keys'}"
            fix = f"compression.kwargs.{near}={value}" if near else ""
            yield Problem(f"compression.kwargs.{key}", value, "there is no such key", why, fix)


def _mistyped_values(config: RunConfig) -> Iterator[Problem]:
    kind = find_compression(config.compression)
    for key, default in (kind.keys or {}).items() if kind is not None else ():
        if key in config.compression.kwargs and type(default) in (bool, int, float, str):
            path, shown = f"compression.kwargs.{key}", str(default).lower() if isinstance(default, bool) else default
            for problem in check_value(type(default), config.compression.kwargs[key], path)[1]:
                yield problem if problem.fix else replace(problem, fix=f"{path}={shown}")


def _own_rules(config: RunConfig) -> Iterator[Problem]:
    """The problems by the rules of the compressor, which rely on the types of its keys."""
    kind = find_compression(config.compression)
    for table in kind.rules if kind is not None and not any(_mistyped_values(config)) else ():
        yield from table.problems(config)


_KEYS: Table[RunConfig] = Table(
    "Keys of a compressor",
    (
        Row(
            "compression.target",
            lambda c: c.compression.target is not None and c.compression.name in COMPRESSORS,
            "belongs to a compressor of your own",
            "{compression.name} is one of the runner's",
            fix="compression.name=mine",
        ),
        Computed("compression.kwargs", _unknown_keys, "must be keys that the compressor has"),
        Computed("compression.kwargs", _mistyped_values, "must be values of the types of the defaults"),
    ),
)

_NUMBERS: Table[RunConfig] = Table(
    "Settings of a compressor",
    (
        *_needed("density", "0.01", lambda density: 0 < density <= 1, "must lie above 0 and not above 1"),
        *_needed("levels", "15", lambda levels: 1 <= levels <= _MOST_LEVELS, f"must be from 1 to {_MOST_LEVELS}"),
        *_needed("rank", "4", lambda rank: rank >= 1, "must be at least 1"),
        Row(
            "compression.error_feedback",
            lambda c: c.compression.error_feedback is not None,
            "belongs to the runner's compressors",
            "{compression.name} has nothing that could be left over, or decides it itself",
            fix="compression.error_feedback=null",
            when=_is(lambda kind: kind.compress is None),
        ),
        Row(
            "compression.start_step",
            lambda c: c.compression.start_step != 0,
            "belongs to the runner's compressors",
            "{compression.name} does not compress, or decides itself when it does",
            fix="compression.start_step=0",
            when=_is(lambda kind: kind.compress is None),
        ),
        at_least("compression.start_step", 0),
    ),
)

_SURROUNDINGS: Table[RunConfig] = Table(
    "Gradients that are compressed",
    (
        Row(
            "compression.name",
            lambda c: c.parallelism.data == 1,
            "must be none with parallelism.data=1",
            "One replica sends its gradients to nobody",
            fix="compression=none",
        ),
        Row(
            "zero.stage",
            lambda c: c.zero.stage is not None,
            "must be null with compression={compression.name}",
            "DeepSpeed sums gradients itself, and keeps parts of them",
            fix="zero.stage=null",
        ),
        Row(
            "optimizer.name",
            _compresses_momentum,
            "must be another with compression={compression.name}",
            "{optimizer.name} compresses its momentum, and sums no gradients at those steps",
            fix="optimizer=adamw",
        ),
        Row(
            "precision.name",
            _scales_losses,
            "must be another with compression={compression.name}",
            "What it leaves over may be of one step's loss scale, and be added to another's",
            fix="precision=bf16_master",
            when=_is(lambda kind: kind.compress is None),
        ),
        Row(
            "compression.name",
            _gradients_are_halves,
            "must be another with precision={precision.name}",
            "Gradients have 16 bits already",
            fix="compression=none",
            when=_is(lambda kind: kind.element_bytes is not None),
        ),
        Computed("compression.*", _own_rules, "must be what the rules of the compressor say"),
    ),
    applies=_compresses,
)

COMPRESSION_TABLES: tuple[Table[RunConfig], ...] = (_KEYS, _NUMBERS, _SURROUNDINGS)
"""All tables of this file, in the order in which they are checked."""
