"""The options of ``approximate_backward`` and the keys that each of them reads. Nothing here needs torch."""

from __future__ import annotations

__all__ = ["APPROXIMATIONS"]

APPROXIMATIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fewbit": ("bits",),
    "randomized_linear": ("ratio",),
    "both": ("bits", "ratio"),
}
