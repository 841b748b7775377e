"""Which operators' outputs a selective policy keeps, by the operators' names.

Names are data here, so that planning needs no torch; the profile and the installed policy ask the same
:class:`SaveChoice`, operator by operator in the order of execution.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ATTENTION", "MATMULS", "PRESETS", "SaveChoice"]

MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)

PRESETS: Mapping[str, tuple[frozenset[str], int]] = {
    "matmuls": (MATMULS, 1),
    "attention": (ATTENTION, 1),
    "every_second_matmul": (MATMULS, 2),
}
"""Name to the operators and which of them: 1 = each, 2 = the second, fourth, … in order of execution."""


class SaveChoice:
    """Decides for one run of one segment; it counts, so each run needs its own.

    Args:
        preset: a key of :data:`PRESETS`.
    """

    def __init__(self, preset: str) -> None:
        self._names, self._every = PRESETS[preset]
        self._seen = 0

    def keeps(self, operator: str) -> bool:
        """Whether the output of the operator that runs now is kept. Ask once for every operator that runs."""
        if operator not in self._names:
            return False
        self._seen += 1
        return self._seen % self._every == 0
