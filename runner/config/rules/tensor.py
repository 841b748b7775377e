"""Rules of tensor parallelism: what layers whose weights several ranks divide cannot be combined with."""

from __future__ import annotations

from collections.abc import Callable

from runner.config.precision import PRECISIONS
from runner.config.rules.table import Row, Table
from runner.config.rules.values import is_given
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import COMPRESSORS, OPTIMIZERS, find_optimizer

__all__ = ["OF_PARTS", "TENSOR_TABLES"]

_WHOLE = "parallelism.tensor=1"
_DECIDING = ("coop", "dtr", "mimose")
OF_PARTS = tuple(
    sorted(
        name
        for name, kind in OPTIMIZERS.items()
        if kind.state_bytes is None and (kind.elementwise or kind.norms_from is not None or kind.whole_matrices)
    )
)
"""The optimizers that can update parts of weights."""


def _takes_parts(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is not None and kind.name in OF_PARTS


def _row(path: str, breaks: Callable[[RunConfig], bool], rule: str, why: str, fix: str) -> Row[RunConfig]:
    return Row(path, breaks, f"{rule} with parallelism.tensor={{parallelism.tensor}}", why, fix=fix)


_PARTS: Table[RunConfig] = Table(
    "Tensor parallelism",
    (
        _row(
            "optimizer.name",
            lambda c: not _takes_parts(c),
            f"must be one of {', '.join(OF_PARTS)}",
            "The others look at whole weights, or at blocks of them, of which a rank has only a part",
            "optimizer=adamw",
        ),
        _row(
            "parallelism.scatter_boundaries",
            lambda c: (
                bool(c.parallelism.scatter_boundaries) and (c.parallelism.sequence or c.parallelism.pipeline == 1)
            ),
            "needs parallelism.pipeline=2 or more and parallelism.sequence=false",
            "Without stages nothing passes between them, and with divided tokens ranks send parts already",
            "parallelism.scatter_boundaries=null",
        ),
        _row(
            "parallelism.batch_sliced",
            lambda c: bool(c.parallelism.batch_sliced) and c.parallelism.sequence,
            "must be null with parallelism.sequence=true",
            "Values would be divided by tokens and by samples",
            "parallelism.sequence=false",
        ),
        _row(
            "compression.name",
            lambda c: c.compression.name not in COMPRESSORS,
            f"must be one of {', '.join(COMPRESSORS)}",
            "Nothing says that your own gives the same for weights that all ranks have whole, beside other parts",
            "compression=none",
        ),
        _row(
            "embedding.name",
            lambda c: c.embedding.name != "dense",
            "must be dense",
            "The cores of a tensor train are no rows that could be divided",
            "embedding=dense",
        ),
        _row(
            "approximate_backward.name",
            lambda c: c.approximate_backward.name != "none",
            "must be none",
            "Each rank would draw its own approximation of one product",
            "approximate_backward=none",
        ),
        _row(
            "precision.name",
            lambda c: PRECISIONS[c.precision.name].four_bits,
            "must be another",
            "The scale of four bits is that of a whole tensor",
            "precision=bf16_mixed",
        ),
        _row(
            "activation_checkpoint.name",
            lambda c: c.activation_checkpoint.name in _DECIDING,
            "must decide before the run",
            "Ranks that divide a layer must run it again together, and each decides by what it measures",
            "activation_checkpoint=full",
        ),
        _row(
            "schedule.opportunistic",
            lambda c: bool(c.schedule.option("opportunistic")),
            "must be false",
            "Ranks that divide a layer could leave their order differently, and would wait for each other for ever",
            "schedule.opportunistic=false",
        ),
        _row(
            "compile",
            lambda c: c.compile,
            "must be false",
            "A compiled layer is not shown to exchange what the layer itself does",
            "compile=false",
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
        Row(
            "parallelism.sequence",
            lambda c: c.parallelism.sequence,
            "belongs to parallelism.tensor=2 and more",
            "It divides values between layers that ranks divide",
            fix="parallelism.tensor=2",
            when=lambda c: is_given(c, "parallelism.sequence"),
        ),
        Row(
            "parallelism.scatter_boundaries",
            lambda c: bool(c.parallelism.scatter_boundaries),
            "belongs to parallelism.tensor=2 and more",
            "It divides what stages exchange among ranks that divide layers",
            fix="parallelism.tensor=2",
            when=lambda c: is_given(c, "parallelism.scatter_boundaries"),
        ),
        Row(
            "parallelism.loss",
            lambda c: c.parallelism.loss in ("vocabulary", "gathered"),
            "belongs to parallelism.tensor=2 and more",
            "It says how logits that ranks divide reach the loss",
            fix="parallelism.tensor=2",
            when=lambda c: is_given(c, "parallelism.loss"),
        ),
        Row(
            "parallelism.batch_sliced",
            lambda c: c.parallelism.batch_sliced is not None,
            "belongs to parallelism.tensor=2 and more",
            "It names modules that ranks run for a part of the batch before layers that they divide",
            fix="parallelism.tensor=2",
            when=lambda c: is_given(c, "parallelism.batch_sliced"),
        ),
        Row(
            "parallelism.tensor_sums",
            lambda c: c.parallelism.tensor_sums in ("native", "ordered"),
            "belongs to parallelism.tensor=2 and more",
            "It says how ranks that divide layers sum what each of them has",
            fix="parallelism.tensor=2",
            when=lambda c: is_given(c, "parallelism.tensor_sums"),
        ),
    ),
    applies=lambda c: c.parallelism.tensor == 1,
)
_LOSSES = ("auto", "vocabulary", "gathered")
_SUMS = ("auto", "native", "ordered")
_ORDERS = ("pipeline_inside",)
_ORDER: Table[RunConfig] = Table(
    "How ranks divide layers, and their order",
    (
        Row(
            "parallelism.loss",
            lambda c: c.parallelism.loss not in _LOSSES,
            f"must be one of {', '.join(_LOSSES)}",
            fix="parallelism.loss=auto",
        ),
        Row(
            "parallelism.tensor_sums",
            lambda c: c.parallelism.tensor_sums not in _SUMS,
            f"must be one of {', '.join(_SUMS)}",
            fix="parallelism.tensor_sums=auto",
        ),
        Row(
            "parallelism.order",
            lambda c: c.parallelism.order not in (None, *_ORDERS),
            f"must be null or one of {', '.join(_ORDERS)}",
            fix="parallelism.order=pipeline_inside",
        ),
        Row(
            "parallelism.order",
            lambda c: c.parallelism.order in _ORDERS and min(c.parallelism.pipeline, c.parallelism.data) == 1,
            "belongs to parallelism.pipeline=2 and parallelism.data=2, or more",
            "Without stages or without replicas there is one order of ranks",
            fix="parallelism.order=null",
        ),
    ),
)

TENSOR_TABLES: tuple[Table[RunConfig], ...] = (_PARTS, _NO_PARTS, _ORDER)
"""All tables of this file, in the order in which they are checked."""
