"""Rules of tensor parallelism: what layers whose weights several ranks divide cannot be combined with."""

from __future__ import annotations

from runner.config.precision import PRECISIONS
from runner.config.rules.table import Row, Table
from runner.config.rules.values import is_given
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import OPTIMIZERS, find_optimizer

__all__ = ["TENSOR_TABLES"]

_WHOLE = "parallelism.tensor=1"
_DECIDING = ("coop", "dtr", "mimose")
_BY_ELEMENT = tuple(sorted(name for name, kind in OPTIMIZERS.items() if kind.elementwise and kind.state_bytes is None))


def _cuts_anywhere(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is not None and kind.name in _BY_ELEMENT


_PARTS: Table[RunConfig] = Table(
    "Tensor parallelism",
    (
        Row(
            "optimizer.name",
            lambda c: not _cuts_anywhere(c),
            f"must be one of {', '.join(_BY_ELEMENT)} with parallelism.tensor={{parallelism.tensor}}",
            "The others look at whole weights, or at blocks of them, of which a rank has only a part",
            fix="optimizer=adamw",
        ),
        Row(
            "zero.stage",
            lambda c: c.zero.stage == 0,
            "must be null or 1 with parallelism.tensor={parallelism.tensor}",
            "Stage 0 is DeepSpeed's own sum, which is not told of parts of weights",
            fix="zero=none",
        ),
        Row(
            "compression.name",
            lambda c: c.compression.name != "none",
            "must be none with parallelism.tensor={parallelism.tensor}",
            "The approximation of a part is another one than a part of the approximation",
            fix="compression=none",
        ),
        Row(
            "adapter.name",
            lambda c: c.adapter.name != "none",
            "must be none with parallelism.tensor={parallelism.tensor}",
            "The matrices of an adapter are not divided yet with the weight that they belong to",
            fix=_WHOLE,
        ),
        Row(
            "embedding.name",
            lambda c: c.embedding.name != "dense",
            "must be dense with parallelism.tensor={parallelism.tensor}",
            "The cores of a tensor train are no rows that could be divided",
            fix="embedding=dense",
        ),
        Row(
            "approximate_backward.name",
            lambda c: c.approximate_backward.name != "none",
            "must be none with parallelism.tensor={parallelism.tensor}",
            "Each rank would draw its own approximation of one product",
            fix="approximate_backward=none",
        ),
        Row(
            "precision.name",
            lambda c: PRECISIONS[c.precision.name].four_bits,
            "must be another with parallelism.tensor={parallelism.tensor}",
            "The scale of four bits is that of a whole tensor",
            fix="precision=bf16_mixed",
        ),
        Row(
            "activation_checkpoint.name",
            lambda c: c.activation_checkpoint.name in _DECIDING,
            "must decide before the run with parallelism.tensor={parallelism.tensor}",
            "Ranks that divide a layer must run it again together, and each decides by what it measures",
            fix="activation_checkpoint=full",
        ),
        Row(
            "schedule.opportunistic",
            lambda c: bool(c.schedule.opportunistic),
            "must be false with parallelism.tensor={parallelism.tensor}",
            "Ranks that divide a layer could leave their order differently, and would wait for each other for ever",
            fix="schedule.opportunistic=false",
        ),
        Row(
            "checkpoint.asynchronous",
            lambda c: c.checkpoint.asynchronous,
            "must be false with parallelism.tensor={parallelism.tensor}",
            "The first rank of those that divide a layer would copy their whole weights, which no plan counts",
            fix="checkpoint=every",
        ),
        Row(
            "compile",
            lambda c: c.compile,
            "must be false with parallelism.tensor={parallelism.tensor}",
            "A compiled layer is not shown to exchange what the layer itself does",
            fix="compile=false",
        ),
    ),
    applies=lambda c: c.parallelism.tensor > 1,
)
_NO_PARTS: Table[RunConfig] = Table(
    "Rules of division",
    (
        Row(
            "parallelism.sharding",
            lambda c: c.parallelism.sharding is not None,
            "belongs to parallelism.tensor=2 and more",
            "It says how modules are divided among ranks",
            fix="parallelism.tensor=2",
            when=lambda c: is_given(c, "parallelism.sharding"),
        ),
    ),
    applies=lambda c: c.parallelism.tensor == 1,
)

TENSOR_TABLES: tuple[Table[RunConfig], ...] = (_PARTS, _NO_PARTS)
"""All tables of this file, in the order in which they are checked."""
