"""Rules of ``kernels``: its keys, and what it cannot be combined with."""

from __future__ import annotations

from runner.config.rules.table import Row, Table
from runner.config.schema import RunConfig

__all__ = ["KERNEL_TABLES"]

_MEANS = ("eager", "fused")

KERNEL_TABLES: tuple[Table[RunConfig], ...] = (
    Table(
        "Kernels",
        (
            Row(
                "kernels.attention",
                lambda c: c.kernels.attention not in (None, *_MEANS),
                f"must be null or one of {', '.join(_MEANS)}",
                fix="kernels.attention=fused",
            ),
            Row(
                "compile",
                lambda c: c.compile,
                "must be false with kernels.attention={kernels.attention}",
                "A compiled layer chooses its operators itself",
                fix="compile=false",
                when=lambda c: c.kernels.attention is not None,
            ),
        ),
    ),
)
"""All tables of this file, in the order in which they are checked."""
