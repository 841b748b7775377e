"""Settings of a rank's C library for freed memory."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KEEP_FREED_MEMORY", "allocator_variables"]

KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""For glibc: blocks up to 32 MiB, the most that it allows, come from the heap, and the heap does not shrink.

By default glibc returns the memory of a freed activation to the system and gets it back for the next activation page by
page, each with a page fault and zeros to write. With these settings a process keeps its peak memory until it ends.
"""


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to add for a rank: none that the user has set, none if the user tunes glibc."""
    if "GLIBC_TUNABLES" in environment:
        return {}
    return {name: value for name, value in KEEP_FREED_MEMORY.items() if name not in environment}
