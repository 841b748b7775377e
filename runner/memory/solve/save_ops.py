"""Decides by operator names which outputs a selective policy keeps.

Operators are given by name, so that planning needs no torch. The profile and the installed policy use the same
:class:`SaveChoice`, and ask it about every operator in the order of execution.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ATTENTION", "CONVOLUTIONS", "MATMULS", "OPERATORS", "PRESETS", "SaveChoice"]

MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
CONVOLUTIONS = frozenset({"aten::convolution"})

PRESETS: Mapping[str, tuple[frozenset[str], int]] = {
    "matmuls": (MATMULS, 1),
    "attention": (ATTENTION, 1),
    "every_second_matmul": (MATMULS, 2),
}
"""By name: operators, and which of their runs are kept: 1 = each, 2 = the second, fourth, … in order of execution."""

OPERATORS: Mapping[str, tuple[frozenset[str], int]] = {**PRESETS, "convolutions": (CONVOLUTIONS, 1)}
"""The presets, and those that graph programs alone may use: their second forwards may lack an input."""


class SaveChoice:
    """Decides which outputs are kept in one run of one segment; it counts operators, so each run needs its own.

    Args:
        preset: a key of :data:`OPERATORS`.
    """

    def __init__(self, preset: str) -> None:
        self._names, self._every = OPERATORS[preset]
        self._seen = 0

    def keeps(self, operator: str) -> bool:
        """Whether the output of the operator that runs now is kept; call it once for every operator that runs."""
        if operator not in self._names:
            return False
        self._seen += 1
        return self._seen % self._every == 0
