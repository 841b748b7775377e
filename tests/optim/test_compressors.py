"""Compressors of gradients alone: what replicas send, what is left over, bias, limits, and bytes by formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import plain_compressors
import pytest
import torch
from compressor_keys import examples_of, section_with
from torch import Tensor

from runner.config.schema import CompressionConfig
from runner.optim.catalogue.compression import CompressionKind, Wire
from runner.optim.catalogue.registry import COMPRESSORS
from runner.optim.compression import timing
from runner.optim.compression.bits import pack, packed_bytes, unpack
from runner.optim.compression.rounds import Compress, Exchanged, Kept, Parts, Rounds, Total, Turn

SHAPES = [(6, 5), (7,), (4, 3, 2), (1,)]
KEYS: dict[str, dict[str, Any]] = {
    name: examples_of(kind) for name, kind in COMPRESSORS.items() if kind.compress is not None
} | {
    "topk": {"density": 0.3}, "randomk": {"density": 0.3}, "qsgd": {"levels": 7}, "powersgd": {"rank": 1},
    "gradzip": {"rank": 1},
}  # fmt: skip
"""Every compressor of the catalogue with legal values of its keys."""
WHOLE: dict[str, dict[str, Any]] = {
    "topk": {"density": 1.0}, "randomk": {"density": 1.0}, "qsgd": {"levels": 32767}, "powersgd": {"rank": 30},
    "gradzip": {"rank": 30},
}  # fmt: skip


def section_of(name: str, **keys: Any) -> CompressionConfig:
    return section_with(COMPRESSORS[name], **{**KEYS.get(name, {}), **keys})


def compress_of(name: str, *, feedback: bool, **keys: Any) -> Compress:
    make = COMPRESSORS[name].compress
    assert make is not None
    return make(section_of(name, **keys), feedback)


def tensors_of(replicas: int, seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(replicas)]


def exchange(
    compress: Compress, values: Sequence[Sequence[Tensor]], kept: Any = None, *, step: int = 0, seed: int = 1
) -> tuple[list[Exchanged], float]:
    """The results of all replicas, played in turns, and the bytes that one replica sends: to each other one what is
    gathered, around a ring what is summed."""
    replicas = len(values)
    kept = kept or [[{} for _ in row] for row in values]
    turns = [Turn(step, replicas, seed, 1000 * seed + at) for at in range(replicas)]
    rounds = [
        compress([each.clone() for each in row], own, turn) for row, own, turn in zip(values, kept, turns, strict=True)
    ]
    asked, sent = [next(each) for each in rounds], 0.0
    while True:
        gathers = isinstance(asked[0], Parts)
        sent += (replicas - 1) * asked[0].tensor.nbytes * (1 if gathers else 2 / replicas)
        if gathers:
            answers: list[Any] = [[each.tensor.clone() for each in asked] for _ in rounds]
        else:
            answers = [reduce(torch.add, [each.tensor for each in asked]) for _ in rounds]
        results, asked = [], []
        for each, answer in zip(rounds, answers, strict=True):
            try:
                asked.append(each.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            return results, sent


def plain_sums(values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(list(column)).sum(dim=0) for column in zip(*values, strict=True)]


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 15])
@pytest.mark.parametrize("count", [1, 13])
def test_packed_numbers_come_back(bits: int, count: int) -> None:
    numbers = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(bits))
    packed = pack(numbers, bits)
    assert (packed.dtype, len(packed)) == (torch.uint8, packed_bytes(count, bits))
    assert unpack(packed, bits, count).tolist() == numbers.tolist()


@pytest.mark.parametrize("replicas", [3])
@pytest.mark.parametrize("name", KEYS)
def test_what_was_sent_and_what_is_left_over_is_what_came_in(name: str, replicas: int) -> None:
    """And all replicas have the same sums."""
    values = tensors_of(replicas)
    found, _ = exchange(compress_of(name, feedback=True), values)
    for at, whole in enumerate(plain_sums(values)):
        total = found[0].sums[at] + torch.stack([each.left[at] for each in found]).sum(dim=0)
        rounded = 2e-2 if name == "bf16" else 3e-3 if name == "fp16" else 1e-5  # sums are rounded to the format, too
        assert torch.allclose(total, whole, atol=rounded), SHAPES[at]
        assert all(torch.equal(found[0].sums[at], each.sums[at]) for each in found)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("fp16", plain_compressors.halves(torch.float16)),
        ("bf16", plain_compressors.halves(torch.bfloat16)),
        ("topk", plain_compressors.largest(0.3)),
        ("signsgd", plain_compressors.signs(vote=False)),
    ],
)
@pytest.mark.parametrize("replicas", [2, 3])
def test_sums_are_those_of_plain_torch(name: str, plain: plain_compressors.Plain, replicas: int) -> None:
    values = tensors_of(replicas)
    found, _ = exchange(compress_of(name, feedback=True), values)
    for at, column in enumerate(zip(*values, strict=True)):
        total, sent = plain(column, {})
        exact = name != "fp16"  # which rounds in another range, and may lose a last bit of what is nearly zero
        assert torch.allclose(found[0].sums[at], total, rtol=0 if exact else 1e-3, atol=1e-6)
        assert torch.allclose(column[0] - found[0].left[at], sent[0], rtol=0 if exact else 1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["randomk", "qsgd"])
def test_the_mean_of_400_draws_is_the_gradient(name: str) -> None:
    """Within five times what one draw's spread leaves of a mean of 400."""
    values = tensors_of(2)
    compress = compress_of(name, feedback=False)
    draws = [exchange(compress, values, seed=seed)[0][0].sums for seed in range(400)]
    for at, whole in enumerate(plain_sums(values)):
        each = torch.stack([draw[at] for draw in draws])
        spread = (each - whole).pow(2).mean(dim=0).sqrt()
        assert float(((each.mean(dim=0) - whole).abs() - 5 * spread / 20).max()) < 1e-4
        assert float(spread.max()) > 0.05 or whole.numel() == 1


def test_a_vote_of_signs_counts_the_mean_magnitude() -> None:
    values = tensors_of(3)
    found, _ = exchange(compress_of("signsgd", feedback=False), values)
    for at, column in enumerate(zip(*values, strict=True)):
        total, _ = plain_compressors.signs(vote=True)(column, {})
        assert torch.allclose(found[0].sums[at], total, atol=1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_at_its_largest_setting_it_is_a_plain_sum(name: str) -> None:
    """Bit for bit but for qsgd, whose 32767 levels leave less than 1/32767 of the norms."""
    values = tensors_of(2)
    found, _ = exchange(compress_of(name, feedback=True, **WHOLE[name]), values)
    for got, whole in zip(found[0].sums, plain_sums(values), strict=True):
        assert torch.equal(got, whole) if name != "qsgd" else torch.allclose(got, whole, atol=2 * 8 / 32767)


def low_rank(rank: int, replicas: int, seed: int) -> list[list[Tensor]]:
    """Matrices of 12 x 10 whose sum has this rank."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.randn(rank, 10, generator=generator)
    return [[torch.randn(12, rank, generator=generator) @ right] for _ in range(replicas)]


@pytest.mark.parametrize("rank", [1, 3])
def test_power_iteration_is_exact_where_the_rank_suffices(rank: int) -> None:
    values = low_rank(rank, 2, seed=5)
    found, _ = exchange(compress_of("powersgd", feedback=True, rank=rank), values)
    assert torch.allclose(found[0].sums[0], plain_sums(values)[0], atol=1e-4)


@pytest.mark.parametrize("rank", [1, 3])
def test_alternating_least_squares_are_exact_in_the_second_step(rank: int) -> None:
    """The first one fits the left factor to a random right one."""
    values = low_rank(rank, 2, seed=5)
    compress = compress_of("gradzip", feedback=True, rank=rank)
    first, _ = exchange(compress, values)
    second, _ = exchange(compress, values, [each.kept for each in first], step=1)
    assert not torch.allclose(first[0].sums[0], plain_sums(values)[0], atol=1e-1)
    assert torch.allclose(second[0].sums[0], plain_sums(values)[0], atol=1e-4)


def decaying(seed: int) -> list[list[Tensor]]:
    """Two replicas' noisy parts of a matrix whose singular values halve, as gradients' do."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(16, 12, generator=generator)).Q for _ in range(2))
    matrix = left @ torch.diag(0.5 ** torch.arange(12.0)) @ right.T
    noise = torch.Generator().manual_seed(seed)
    return [[matrix + 0.001 * torch.randn(16, 16, generator=noise)] for _ in range(2)]


def test_after_warm_steps_half_an_alternation_is_as_near_as_a_power_iteration() -> None:
    """Its error is at most 2 percent above; both are near the best of that rank. While steps change little, that is."""
    errors = {}
    for name in ("powersgd", "gradzip"):
        kept = None
        for step in range(12):
            values = decaying(step)
            found, _ = exchange(compress_of(name, feedback=False, rank=2), values, kept, step=step)
            kept = [each.kept for each in found]
        errors[name] = float((found[0].sums[0] - plain_sums(values)[0]).norm())
    best = float(torch.linalg.svdvals(plain_sums(values)[0])[2:].norm())
    assert errors["gradzip"] <= 1.02 * errors["powersgd"]
    assert best * 0.999 <= errors["powersgd"] <= 1.05 * best


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", KEYS)
def test_what_is_not_finite_on_one_replica_is_not_finite_on_all(name: str, bad: float) -> None:
    for at, shape in enumerate(SHAPES):
        values = tensors_of(2)
        values[1][at].view(-1)[-1] = bad
        found, _ = exchange(compress_of(name, feedback=True), values)
        for each in found:
            assert not all(bool(torch.isfinite(total).all()) for total in each.sums), shape


@pytest.mark.parametrize("name", KEYS)
def test_zeros_stay_zeros(name: str) -> None:
    values = [[torch.zeros(shape) for shape in SHAPES] for _ in range(2)]
    kept = None
    for step in range(2):
        found, _ = exchange(compress_of(name, feedback=True), values, kept, step=step)
        kept = [each.kept for each in found]
        assert all(float(total.abs().max()) == 0 for total in found[0].sums)


def test_float16_has_room_for_the_sum() -> None:
    values = [[torch.tensor([60000.0, 1.0])] for _ in range(3)]
    (found, *_), _ = exchange(compress_of("fp16", feedback=False), values)
    assert found.sums[0].tolist() == [pytest.approx(180000.0, rel=1e-3), 3.0]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", KEYS)
def test_bytes_by_formula_are_those_of_the_messages(name: str, replicas: int) -> None:
    """Of two steps, because gradzip sends one factor, then the other."""
    kind: CompressionKind = COMPRESSORS[name]
    compress, kept, sent = compress_of(name, feedback=True), None, 0.0
    for step in range(2):
        found, own = exchange(compress, tensors_of(replicas), kept, step=step)
        kept = [each.kept for each in found]
        sent += own
    wire = Wire(section_of(name), SHAPES, 4, replicas)
    assert kind.bytes_in_a_step(wire) == pytest.approx(sent / 2)
    whole = COMPRESSORS["none"].bytes_in_a_step(wire)
    assert kind.bytes_in_a_step(wire) != whole, (
        "a compressor that sends the bytes of whole gradients may be a user's own"
    )


def test_the_seconds_of_a_compressor_are_its_median_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is played with a clock that the compressor itself moves on: the first one does not count."""
    now, steps = [0.0], [50.0, 3.0, 1.0, 2.0]

    def compress(values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Rounds:
        now[0] += steps[turn.step]
        before = [value.clone() for value in values]
        parts = yield Parts(values[0])
        total = yield Total(values[1])
        assert [part.equal(before[0]) for part in parts] == [True] * 3
        assert torch.equal(total, 3 * before[1])
        return Exchanged(before, before, kept)

    monkeypatch.setattr("runner.optim.compression.timing.time.perf_counter", lambda: now[0])
    seconds = timing.compression_seconds(compress, [(2, 3), (4,)], 3, torch.device("cpu"), runs=3)
    assert seconds == 2.0
