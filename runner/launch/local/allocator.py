"""What a rank's C library does with freed memory."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KEEP_FREED_MEMORY", "allocator_variables"]

KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc: blocks up to 32 MiB, the most that it allows, come from the heap, and the heap does not shrink.

By default it gives the memory of a freed activation back to the system, and gets it again for the next one page by
page, each a fault and zeros to write. A process then keeps the memory of its peak until it ends.
"""


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add for a rank: none that the user has set, and none where the user tunes the C library."""
    if "GLIBC_TUNABLES" in environment:
        return {}
    return {name: value for name, value in KEEP_FREED_MEMORY.items() if name not in environment}
