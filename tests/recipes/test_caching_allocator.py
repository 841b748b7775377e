"""The rules of torch's caching allocator, by hand: c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runner.recipes.benchmarks.caching_allocator import CachingAllocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),  # what is left over, 1 MiB, is too little to part
    ],
)
def test_sizes_are_rounded(asked: int, allocated: int, reserved: int) -> None:
    memory = CachingAllocator()
    memory.allocate("a", asked)
    assert memory.reserved == reserved
    assert memory.allocated in (allocated, reserved)  # a rest that is too small stays with its block


def test_the_smallest_block_that_fits_is_parted_and_joined_again() -> None:
    memory = CachingAllocator()
    for name, size in (("large", 60), ("middle", 30), ("other", 20)):
        memory.allocate(name, size * MIB)
    for name in ("large", "middle"):
        memory.release(name)
    memory.allocate("a", 24 * MIB)  # of the 30
    memory.allocate("b", 6 * MIB)  # its rest
    assert (memory.allocated, memory.reserved) == (50 * MIB, 110 * MIB)
    memory.release("a")
    memory.release("b")
    memory.allocate("c", 30 * MIB)
    memory.allocate("d", 60 * MIB)
    assert (memory.allocated, memory.reserved) == (110 * MIB, 110 * MIB)


def test_free_blocks_of_two_segments_do_not_make_a_large_one() -> None:
    memory = CachingAllocator()
    memory.allocate("a", 40 * MIB)
    memory.allocate("b", 40 * MIB)
    memory.release("a")
    memory.release("b")
    memory.allocate("c", 80 * MIB)
    assert (memory.most_allocated, memory.reserved) == (80 * MIB, 160 * MIB)
    memory.empty_cache()
    assert memory.reserved == 80 * MIB


def test_whatever_comes_and_goes_all_of_it_is_free_in_the_end() -> None:
    rng, memory = random.Random(0), CachingAllocator()
    held: list[Any] = []
    for name in range(3000):
        if held and rng.random() < 0.5:
            memory.release(held.pop(rng.randrange(len(held))))
        else:
            memory.allocate(name, int(10 ** rng.uniform(1, 8)))
            held.append(name)
        assert memory.allocated <= memory.reserved
    for name in held:
        memory.release(name)
    assert memory.allocated == 0
    memory.empty_cache()
    assert memory.reserved == 0  # so that every block joined its neighbours
