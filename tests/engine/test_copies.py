"""Copies of weights on several ranks are compared at the start and every so many steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from small_models import Unembed, token_loss
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.engine import Engine
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.copies import tensor_checksum
from runner.errors import RunFailedError

Batch = tuple[Tensor, Tensor]


def make() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 5))


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def run(
    models: list[nn.Sequential],
    act: Callable[[Engine, Callable[[int], None]], None],
    *,
    pipeline: int = 2,
    data: int = 2,
    loss: Callable[..., Any] = functional.cross_entropy,
    make_batch: Callable[[int], Batch] = batch,
) -> None:
    """Run ``act`` on every rank, with its engine and a function that takes a step of the given number."""
    layout: dict[str, Any] = {
        "schedule": "1f1b", "pipeline": pipeline, "data": data, "count": 2, "twin_check_every": 2,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
    }  # fmt: skip

    def on_rank(transport: ThreadTransport) -> None:
        engine = make_engine(models[transport.rank], loss, transport, **layout)

        def step(number: int) -> None:
            engine.submit(part_of(make_batch(number), transport, pipeline, data))

        act(engine, step)

    run_ranks(pipeline * data, on_rank)


def test_a_bit_that_flips_in_one_replica_is_found_by_the_ranks_of_its_stage() -> None:
    """Ranks are position * 2 + replica."""

    def act(engine: Engine, step: Callable[[int], None]) -> None:
        engine.compare_copies()
        for number in range(3):
            step(number)
        if engine.transport.rank == 3:
            weight = engine.stages[1].get_parameter("layers.1.weight")
            weight.data.view(torch.int32)[2, 5] ^= 1 << 10
        if engine.transport.rank < 2:
            step(3)
            return
        said = "after step 4: the copies of 3.weight on ranks 2 and 3 differ, though their gradients are summed"
        with pytest.raises(RunFailedError, match=said):
            step(3)

    run([make() for _ in range(4)], act)


def test_running_statistics_of_replicas_differ_and_are_no_harm() -> None:
    def act(engine: Engine, step: Callable[[int], None]) -> None:
        engine.compare_copies()
        for number in range(4):
            step(number)
        engine.compare_copies()

    run([make() for _ in range(2)], act, pipeline=1)


def test_buffers_of_replicas_start_equal() -> None:
    models = [make() for _ in range(2)]
    statistics: Any = models[1][1].running_mean
    statistics += 1e-3

    def act(engine: Engine, step: Callable[[int], None]) -> None:
        with pytest.raises(
            RunFailedError,
            match="before the first step: the copies of 1.running_mean on ranks 0 and 1 differ: the model",
        ):
            engine.compare_copies()

    run(models, act, pipeline=1)


def test_tied_weights_start_equal_on_both_stages() -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(7)
        embedding: Any = nn.Embedding(11, 6)
        return nn.Sequential(embedding, nn.Linear(6, 6), nn.Tanh(), Unembed(embedding.weight))

    def tokens(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, 11, (8, 5), generator=generator), torch.randint(0, 11, (8, 5), generator=generator)

    def act(engine: Engine, step: Callable[[int], None]) -> None:
        engine.compare_copies()
        for number in range(2):
            step(number)
        if engine.transport.rank == 1:
            weight = next(iter(engine.stages[1].parameters()))
            weight.data[3, 2] += 1e-3
        with pytest.raises(RunFailedError, match="step 2: the copies of 0.weight on ranks 0 and 1 differ"):
            engine.compare_copies()

    run([tied() for _ in range(2)], act, data=1, loss=token_loss, make_batch=tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_checksum_covers_every_bit_and_its_place(dtype: torch.dtype) -> None:
    """Over several chunks of a checksum's sums."""
    generator = random.Random(3)
    tensor = torch.randn(70_000, generator=torch.Generator().manual_seed(1)).mul(100).to(dtype)
    plain = tensor_checksum(tensor)
    assert tensor_checksum(tensor.clone()) == plain
    for _ in range(20):
        one, other = generator.randrange(len(tensor)), generator.randrange(len(tensor))
        changed = tensor.clone()
        changed[[one, other]] = tensor[[other, one]]
        assert (tensor_checksum(changed) != plain) == (not torch.equal(tensor[one], tensor[other]))
        flipped = tensor.clone()
        size = flipped.element_size()
        if dtype is not torch.bool:
            flipped.view(torch.uint8)[one * size + generator.randrange(size)] ^= 1 << generator.randrange(8)
            assert tensor_checksum(flipped) != plain
    assert tensor_checksum(torch.empty(0, dtype=dtype)) == 0
    assert tensor_checksum(tensor.view(700, 100).T) == tensor_checksum(tensor.view(700, 100).T.contiguous())


def test_weights_that_two_stages_use_in_another_order_are_equal() -> None:
    def mirrored() -> nn.Sequential:
        torch.manual_seed(7)
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        return nn.Sequential(first, second, nn.Tanh(), second, first, nn.Tanh())

    def act(engine: Engine, step: Callable[[int], None]) -> None:
        engine.compare_copies()
        for number in range(4):
            step(number)

    run([mirrored() for _ in range(2)], act, data=1)
