"""The C library's settings of ranks."""

from __future__ import annotations

import subprocess
import sys

from runner.launch.local.allocator import KEEP_FREED_MEMORY, allocator_variables

FAULTS = """
import resource
blocks = [b"x" * (1 << 22) for _ in range(8)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    blocks = None
    blocks = [b"x" * (1 << 22) for _ in range(8)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_used_again_without_page_faults() -> None:
    def faults(environment: dict[str, str]) -> int:
        command = [sys.executable, "-c", FAULTS]
        return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)

    kept, default = faults({**KEEP_FREED_MEMORY}), faults({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)})
    assert kept < default / 20


def test_what_the_user_has_set_stays() -> None:
    assert allocator_variables({}) == KEEP_FREED_MEMORY
    assert "MALLOC_TRIM_THRESHOLD_" not in allocator_variables({"MALLOC_TRIM_THRESHOLD_": "1"})
    assert allocator_variables({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}) == {}
