"""Arenas of tensors with known lifetimes: beside the bytes alive, best fit, and every way to place few tensors."""

from __future__ import annotations

import random
from itertools import permutations
from statistics import mean

import pytest

from runner.memory.solve.static_arena import (
    ArenaFigures,
    ArenaPlan,
    TensorLife,
    best_fit,
    lives_of,
    most_alive,
    plan_arena,
)


def drawn(seed: int, count: int, moments: int = 20) -> list[TensorLife]:
    """Tensors of 1 to 30 bytes, each alive for 1 to 10 moments."""
    chance = random.Random(seed)
    lives = []
    for _ in range(count):
        begins = chance.randrange(moments)
        lives.append(TensorLife(chance.randint(1, 30), begins, begins + chance.randint(1, 10)))
    return lives


def alive_together(one: TensorLife, other: TensorLife) -> bool:
    return bool(set(range(one.begins, one.ends)) & set(range(other.begins, other.ends)))


def overlaps(lives: list[TensorLife], plan: ArenaPlan) -> bool:
    """Whether two tensors share a byte at a moment when both are alive, or one lies outside of the arena."""
    bytes_of = [set(range(at, at + each.num_bytes)) for at, each in zip(plan.offsets, lives, strict=True)]
    if any(max(each) >= plan.num_bytes or min(each) < 0 for each in bytes_of):
        return True
    pairs = ((one, other) for one in range(len(lives)) for other in range(one))
    return any(alive_together(lives[a], lives[b]) and bytes_of[a] & bytes_of[b] for a, b in pairs)


def least_arena(lives: list[TensorLife]) -> int:
    """The smallest arena of all. In the order of its offsets, each tensor is as low as those before it allow."""
    best = sum(each.num_bytes for each in lives)
    for order in permutations(lives):
        placed: list[tuple[int, TensorLife]] = []
        for each in order:
            beside = [(at, other) for at, other in placed if alive_together(each, other)]
            floors = sorted({0, *(at + other.num_bytes for at, other in beside)})
            free = (
                at
                for at in floors
                if all(at + each.num_bytes <= low or low + other.num_bytes <= at for low, other in beside)
            )
            placed.append((next(free), each))
        best = min(best, max(at + each.num_bytes for at, each in placed))
    return best


@pytest.mark.parametrize("seed", [0, 9, 19, 29])
def test_no_two_tensors_that_are_alive_at_once_share_a_byte(seed: int) -> None:
    lives = drawn(seed, count=5 + seed)
    for plan in (plan_arena(lives), best_fit(lives)):
        assert not overlaps(lives, plan)
        assert plan.num_bytes == max(at + each.num_bytes for at, each in zip(plan.offsets, lives, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_an_arena_is_between_the_bytes_alive_and_best_fit(seed: int) -> None:
    lives = drawn(seed, count=60)
    bound = max(sum(each.num_bytes for each in lives if each.begins <= now < each.ends) for now in range(40))
    assert most_alive(lives) == bound
    assert bound <= plan_arena(lives).num_bytes <= best_fit(lives).num_bytes


def test_the_arena_is_smaller_than_best_fits_on_average() -> None:
    figures = [ArenaFigures.of(drawn(seed, count=60)) for seed in range(12)]
    assert mean(each.best_fit_bytes / each.bound_bytes for each in figures) > 1.05
    assert mean(each.arena_bytes / each.bound_bytes for each in figures) < 1.02


@pytest.mark.parametrize(("count", "seeds"), [(3, 6), (5, 6), (6, 1)])
def test_few_tensors_take_no_more_than_the_smallest_arena(count: int, seeds: int) -> None:
    for seed in range(seeds):
        lives = drawn(seed, count, moments=8)
        assert plan_arena(lives).num_bytes == least_arena(lives)


def test_best_fit_takes_the_smallest_gap_that_is_large_enough() -> None:
    """Gaps of 8 and 5 bytes are free when 5 bytes are asked for, and then 6: both have room."""
    lives = [
        TensorLife(8, 0, 2), TensorLife(1, 0, 9), TensorLife(5, 0, 2), TensorLife(1, 0, 9),
        TensorLife(5, 3, 9), TensorLife(6, 4, 9),
    ]  # fmt: skip
    assert best_fit(lives) == ArenaPlan(15, (0, 8, 9, 14, 9, 0))


def test_knowing_what_comes_saves_what_best_fit_leaves_between() -> None:
    """Best fit puts the long-lived tensor above the short one, and then has no room for the large one below it."""
    lives = [TensorLife(4, 0, 2), TensorLife(1, 1, 9), TensorLife(8, 2, 9)]
    assert ArenaFigures.of(lives) == ArenaFigures(3, bound_bytes=9, best_fit_bytes=13, arena_bytes=9)


def test_what_goes_and_comes_back_is_another_tensor() -> None:
    moments = [{"a": 3}, {"a": 3, "b": 2}, {"b": 2, "nothing": 0}, {"a": 3, "b": 1}]
    assert lives_of(moments) == [
        TensorLife(3, 0, 2), TensorLife(2, 1, 3), TensorLife(3, 3, 4), TensorLife(1, 3, 4),
    ]  # fmt: skip


def test_nothing_takes_no_arena() -> None:
    assert ArenaFigures.of([]) == ArenaFigures(0, 0, 0, 0)
