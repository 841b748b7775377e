"""Every schedule gives what one process gives, in losses and weights, by a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of, train_in_threads
from orders import in_order, looping, zigzag
from reference import train
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.engine import Engine
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.layers import StageModule
from runner.schedule.catalogue import registry
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.values import Schedule

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
NOT_HERE = {"from_file", "auto", "pipefisher"}  # the search has tests of its own, and so has K-FAC's work
FLUSHED = [name for name, spec in registry.SPECS.items() if spec.kind == "synchronous" and name not in NOT_HERE]


def make_model(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU(), norm(12)) for _ in range(8)]
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 5))


def make_batches(batch: int, steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 6, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(steps)
    ]


def assert_equals_one_process(
    schedule: Schedule, batch: int, *, data: int = 1, clip_norm: float | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """The bits of one process that sums each replica's micro-batches, and then the replicas."""
    options: dict[str, Any] = {"count": schedule.microbatches, "clip_norm": clip_norm, "optimizer": adamw}
    has_copies = any(len(schedule.copies_of(stage)) > 1 for stage in range(schedule.stages))
    make = partial(make_model, nn.LayerNorm if has_copies else nn.BatchNorm1d)  # copies have no running statistics
    expected_model, loss = make(), functional.cross_entropy
    expected = train(expected_model, loss, make_batches(batch), replicas=data, by_replica=True, dtype=dtype, **options)
    layout: dict[str, Any] = {"pipeline": schedule.ranks, "data": data, "schedule": schedule, "dtype": dtype}
    losses, weights = train_in_threads(make, loss, make_batches(batch), **layout, **options)
    assert all(rank == expected for rank in losses)
    state = expected_model.state_dict()
    assert weights.keys() == state.keys()
    if data > 1:  # each replica's batch norm sees its own samples
        state = dict(expected_model.named_parameters())
    assert [name for name in state if not torch.equal(weights[name], state[name])] == []


def assert_near_one_process(
    found: tuple[list[list[float]], dict[str, Tensor]], model: nn.Module, **options: Any
) -> None:
    """To the rounding of sums in another order."""
    losses, weights = found
    expected = train(model, **options)
    torch.testing.assert_close(losses[0], expected, rtol=1e-5, atol=0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=2e-4, atol=2e-5)


IN_ORDER = [name for name in FLUSHED if registry.build(name, ranks=4, microbatches=8).sums_in_order]
SIZES = {"bpipe": ((4, 8), (4, 7))}
"""Ranks and micro-batches where they are not (3, 6) and (2, 4)."""


@pytest.mark.costly
@pytest.mark.parametrize("name", IN_ORDER)
def test_every_schedule_equals_one_process(name: str) -> None:
    """Uneven micro-batches; in one replica, and in two, whose gradients are clipped."""
    (ranks, count), (few, least) = SIZES.get(name, ((3, 6), (2, 4)))
    assert_equals_one_process(registry.build(name, ranks=ranks, microbatches=count), 3 * count - 1)
    assert_equals_one_process(registry.build(name, few, least), 6 * least - 1, data=2, clip_norm=0.05)


def test_the_schedules_that_sum_in_another_order_are_these() -> None:
    assert set(FLUSHED) - set(IN_ORDER) == {"looped_bfs", "gems", "chimera", "dualpipe", "bitpipe"}


@pytest.mark.costly
def test_last_in_first_out_equals_one_process_to_rounding() -> None:
    """Those of two directions are in test_twins.py."""
    schedule = registry.build("looped_bfs", ranks=4, microbatches=4)
    options: dict[str, Any] = {"count": 4, "clip_norm": 0.5, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    shared: dict[str, Any] = {"loss": functional.cross_entropy, "batches": make_batches(11)}
    found = train_in_threads(make_model, pipeline=4, data=1, schedule=schedule, **shared, **options)
    assert_near_one_process(found, make_model(), **shared, **options)


def masked_sum(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A ``(sum, weight)`` loss: class 0 does not count."""
    counts = (target > 0).float()
    return (functional.cross_entropy(output, target, reduction="none") * counts).sum(), counts.sum()


@pytest.mark.parametrize(("batch", "pipeline"), [(13, 1), (13, 3), (2, 3)])
def test_replicas_are_one_loop_over_all_microbatches(batch: int, pipeline: int) -> None:
    """Some of them without a sample, and losses that count some of the samples."""
    options: dict[str, Any] = {"count": 4, "clip_norm": 0.5, "optimizer": partial(torch.optim.SGD, lr=0.5)}
    shared: dict[str, Any] = {"loss": masked_sum, "batches": make_batches(batch)}
    make = partial(make_model, nn.LayerNorm)
    found = train_in_threads(make, pipeline=pipeline, data=2, schedule="1f1b", **shared, **options)
    assert_near_one_process(found, make(), replicas=2, **shared, **options)


@pytest.mark.parametrize(
    ("placement", "delay", "recomputed", "dtype"),
    [
        (zigzag(1, 3), 3, (), torch.float32), (zigzag(4, 2), 0, (0, 2, 4), torch.float32),
        (looping(2, 3), None, (0, 2, 4), torch.float32), (looping(4, 2), 3, (), torch.bfloat16),
    ],
)  # fmt: skip
def test_any_placement_equals_one_process(
    placement: tuple[int, ...], delay: int | None, recomputed: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Split, recomputed, and with the parts of a backward fused where they stand together."""
    schedule = in_order(placement, 4, ahead=max(placement) + 1, delay=delay, recomputed=recomputed)
    assert_equals_one_process(schedule, 11, clip_norm=0.05, dtype=dtype)
    fused = fuse_backwards(schedule)
    assert (fused == schedule) == (delay != 0)
    if fused != schedule:
        assert_equals_one_process(fused, 11, clip_norm=0.05, dtype=dtype)


V_SHAPE = """\
0F0,,,0F1,3F0,3I0,3F1,3I1,3W0,3W1,0I0,0I1,0W0,0W1
1F0,2F0,1F1,2F1,2I0,1I0,2B1,1I1,2W0,1W0,1W1
"""


def from_file(folder: Path) -> Schedule:
    """A V of two ranks, two chunks and two micro-batches, of whose backwards one is whole."""
    path = folder / "schedule.csv"
    path.write_text(V_SHAPE)
    schedule = registry.build("from_file", ranks=2, microbatches=2, chunks=2, file=str(path))
    assert schedule.placement == ((0, 1, 1, 0),)
    return schedule


def test_a_users_order_equals_one_process_and_is_the_order_that_runs(tmp_path: Path) -> None:
    schedule = from_file(tmp_path)
    assert_equals_one_process(schedule, 7)
    assert ran(schedule) == [[str(action) for action in row] for row in schedule.actions]


def ran(schedule: Schedule) -> list[list[str]]:
    """The actions of each rank in one step, after which the engine holds nothing."""
    models = [make_model() for _ in range(schedule.ranks)]

    def run(transport: ThreadTransport) -> list[str]:
        engine = engine_of(models[transport.rank], transport, schedule)
        engine.submit(part_of(make_batches(12)[0], transport, schedule.ranks, 1, schedule))
        engine.drain()
        return [f"{event.stage}{event.op}{event.microbatch}" for event in engine.timeline.events[-1][1]]

    return run_ranks(schedule.ranks, run)


def engine_of(model: nn.Module, transport: ThreadTransport, schedule: Schedule) -> Engine:
    return make_engine(
        model, functional.cross_entropy, transport, schedule=schedule, pipeline=schedule.ranks, data=1,
        count=schedule.microbatches, optimizer=adamw,
    )  # fmt: skip


def test_a_recomputed_forward_runs_twice() -> None:
    schedule = in_order(looping(2, 1), 3, ahead=3, recomputed=[0])
    models = [make_model() for _ in range(2)]

    def run(transport: ThreadTransport) -> int:
        engine, calls = engine_of(models[transport.rank], transport, schedule), list[object]()
        next(iter(engine.stages.values())).register_forward_hook(lambda *_: calls.append(None))
        engine.submit(part_of(make_batches(6)[0], transport, 2, 1, schedule))
        engine.drain()
        return len(calls)

    assert run_ranks(2, run) == [6, 3]
    assert ran(schedule) == [[str(action) for action in row] for row in schedule.actions]


def make_random() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.GELU()) for _ in range(6)))


@pytest.mark.parametrize("name", ["zb_v", "varuna", "pipefb"])
def test_dropout_is_that_of_one_rank(name: str) -> None:
    """Keyed by step, micro-batch and layer: the same numbers wherever a layer is, and when it runs again."""
    batches = [(x, torch.zeros_like(x)) for x, _ in make_batches(10)]
    options: dict[str, Any] = {"data": 1, "count": 4, "optimizer": adamw}
    expected = train_in_threads(make_random, functional.mse_loss, batches, schedule="gpipe", pipeline=1, **options)
    schedule = registry.build(name, ranks=3, microbatches=4)
    made = train_in_threads(make_random, functional.mse_loss, batches, schedule=schedule, pipeline=3, **options)
    assert made[0] == expected[0] * 3
    assert all(torch.equal(made[1][key], value) for key, value in expected[1].items())


def test_dropout_of_replicas_is_that_of_one_rank() -> None:
    """A replica's micro-batches are numbered after those of the replicas before it."""
    batches = [(x, torch.zeros_like(x)) for x, _ in make_batches(12)]
    options: dict[str, Any] = {"schedule": "gpipe", "pipeline": 1, "optimizer": partial(torch.optim.SGD, lr=0.5)}
    expected = train_in_threads(make_random, functional.mse_loss, batches, data=1, count=4, **options)
    made = train_in_threads(make_random, functional.mse_loss, batches, data=2, count=2, **options)
    for losses in made[0]:
        assert losses == pytest.approx(expected[0][0], rel=1e-6)
    for key, value in expected[1].items():
        torch.testing.assert_close(made[1][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["zb_v", "bitpipe"])
def test_validation_and_prediction_run_forward_once_through_all_chunks(name: str) -> None:
    schedule = registry.build(name, ranks=2, microbatches=4)
    make = partial(make_model, nn.LayerNorm)
    models, batch = [make() for _ in range(2)], make_batches(10)[0]

    def run(transport: ThreadTransport) -> Any:
        engine, part = engine_of(models[transport.rank], transport, schedule), part_of(batch, transport, 2, 1, schedule)
        return engine.evaluate(part), engine.predict(part)

    whole = make().eval()
    expected = whole(batch[0])
    loss = functional.cross_entropy(expected, batch[1]).item()
    (first, output), (second, nothing) = run_ranks(2, run)
    assert nothing is None, "rank 0 has the last stage"
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert first == second
    assert first[1] == 10
    assert first[0] / first[1] == pytest.approx(loss, rel=1e-6)


class Kept:
    """Keeps the gradients of a stage as a :class:`Sharding` does, on one replica."""

    def __init__(self, stage: StageModule) -> None:
        self.forward = stage

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
        torch.autograd.backward(roots, gradients)

    def are_finite(self) -> bool:
        return True

    def norm(self) -> None:
        return None

    def begin(self, backwards: int) -> None: ...

    def divide_at_update(self, divisor: float) -> None: ...

    def discard(self, *, applied: bool) -> None: ...


def test_a_sample_that_stands_in_for_none_changes_no_statistics() -> None:
    """Under ZeRO every replica takes part in every micro-batch; the second of one sample is such a one."""
    batch, made = (torch.randn(1, 3, 4), torch.zeros(1, 3, 4)), nn.Sequential(nn.BatchNorm1d(3))

    def run(transport: ThreadTransport) -> None:
        options: dict[str, Any] = {"schedule": "gpipe", "pipeline": 1, "data": 1, "count": 2, "optimizer": adamw}
        engine = make_engine(made, functional.mse_loss, transport, sharding=Kept, **options)
        engine.submit(part_of(batch, transport, 1, 1))

    run_ranks(1, run)
    expected = nn.BatchNorm1d(3)
    expected(batch[0])
    for name, value in expected.named_buffers():
        assert torch.equal(made[0].get_buffer(name), value), name
