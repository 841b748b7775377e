"""Rules of the compression of gradients: settings that fit no compressor, and the rules of each compressor."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.precision import PRECISIONS
from runner.config.rules.table import Computed, Row, Table
from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean
from runner.optim.catalogue.registry import COMPRESSORS, find_compression, find_optimizer

__all__ = ["COMPRESSION_TABLES"]


def _compresses(config: RunConfig) -> bool:
    return config.compression.name != "none" and find_compression(config.compression) is not None


def _compresses_momentum(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is not None and kind.compresses


def _scales_losses(config: RunConfig) -> bool:
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.loss_scaling


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


def _own_rules(config: RunConfig) -> Iterator[Problem]:
    kind = find_compression(config.compression)
    for table in kind.rules if kind is not None else ():
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
            "What compression leaves over is of one step's loss scale, and is added to another's",
            fix="precision=bf16_master",
        ),
        Computed("compression.*", _own_rules, "must be what the rules of the compressor say"),
    ),
    applies=_compresses,
)

COMPRESSION_TABLES: tuple[Table[RunConfig], ...] = (_KEYS, _SURROUNDINGS)
"""All tables of this file, in the order in which they are checked."""
