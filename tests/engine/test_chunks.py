"""Several stages per rank in any placement, split and recomputed, give what one process gives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from covering import covering
from layouts import make_engine, part_of, train_in_threads
from orders import in_order, looping, zigzag
from reference import train
from small_models import Unembed, token_loss
from torch import nn
from torch.nn import functional

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.layers import StageModule, layers_of
from runner.model.ties import find_ties, with_all_names
from runner.schedule.catalogue import registry
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.values import Action, Schedule, parse_action
from runner.zoo import gpt

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"looping": looping, "zigzag": zigzag}


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU(), nn.BatchNorm1d(12)) for _ in range(14)]
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 5))


def make_batches(batch: int, steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 6, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(steps)
    ]


def assert_equals_one_process(
    schedule: Schedule, batch: int, *, data: int = 1, clip_norm: float | None = None, **layout: Any
) -> None:
    options: dict[str, Any] = {"count": schedule.microbatches, "clip_norm": clip_norm, "optimizer": adamw}
    layout |= {"pipeline": schedule.ranks, "data": data, "schedule": schedule}
    expected_model = make_model()
    loss = functional.cross_entropy
    expected = train(expected_model, loss, make_batches(batch), replicas=data, by_replica=True, **options)
    losses, weights = train_in_threads(make_model, loss, make_batches(batch), **layout, **options)
    assert all(rank == expected for rank in losses)
    state = expected_model.state_dict()
    assert weights.keys() == state.keys()
    if data > 1:  # each replica's batch norm sees its own samples
        state = dict(expected_model.named_parameters())
    assert [name for name in state if not torch.equal(weights[name], state[name])] == []


MATRIX: dict[str, list[Any]] = {
    "placement": ["looping", "zigzag"],
    "ranks": [1, 2, 4],
    "chunks": [2, 3],
    "delay": [None, 0, 3],
    "recomputed": [False, True],
    "batch": [16, 11],
    "clip_norm": [None, 0.05],
}


@pytest.mark.parametrize(list(MATRIX), covering(MATRIX, strength=2))
def test_any_placement_equals_one_process(
    placement: str, ranks: int, chunks: int, delay: int | None, recomputed: bool, batch: int, clip_norm: float | None
) -> None:
    stages = PLACEMENTS[placement](ranks, chunks)
    again = range(0, len(stages), 2) if recomputed else ()
    schedule = in_order(stages, 4, ahead=ranks, delay=delay, recomputed=again)
    assert_equals_one_process(schedule, batch, clip_norm=clip_norm)
    fused = fuse_backwards(schedule)
    if fused != schedule:
        assert_equals_one_process(fused, batch, clip_norm=clip_norm)


IN_ORDER = [
    "1f1b_eager", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_auto", "zb_v", "v_half", "v_min", "dualpipe_v", "hanayo",
    "varuna",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ranks", "clip_norm"), covering({"name": IN_ORDER, "ranks": [2, 4], "clip_norm": [None, 0.05]}, strength=1)
)
def test_every_schedule_equals_one_process(name: str, ranks: int, clip_norm: float | None) -> None:
    """The clipped batch is uneven."""
    schedule = registry.build(name, ranks=ranks, microbatches=2 * ranks)
    assert schedule.sums_in_order
    assert_equals_one_process(schedule, 4 * ranks if clip_norm is None else 6 * ranks - 1, clip_norm=clip_norm)


@pytest.mark.parametrize("ranks", [2, 4])
def test_last_in_first_out_equals_one_process_to_rounding(ranks: int) -> None:
    schedule = registry.build("looped_bfs", ranks=ranks, microbatches=4)
    assert not schedule.sums_in_order
    options: dict[str, Any] = {"count": 4, "clip_norm": 0.5, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    model = make_model()
    expected = train(model, functional.cross_entropy, make_batches(11), **options)
    losses, weights = train_in_threads(
        make_model, functional.cross_entropy, make_batches(11), pipeline=ranks, data=1, schedule=schedule, **options
    )
    torch.testing.assert_close(losses[0], expected, rtol=1e-5, atol=0)
    assert losses[0][0] == expected[0], "forwards run in order"
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v", "varuna"])
def test_replicas(name: str) -> None:
    assert_equals_one_process(registry.build(name, ranks=2, microbatches=4), 23, data=2, clip_norm=0.05)


class Delayed:
    """Sleeps inside of each layer for a time of its own, forward and backward."""

    def __init__(self) -> None:
        self._random = random.Random(5)

    def __call__(self, module: StageModule, stage: int) -> None:
        for layer in module.layers:
            layer.register_forward_hook(self._delay)

    def _delay(self, layer: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self._sleep()
        output.register_hook(self._sleep)  # type: ignore[no-untyped-call]  # the library's

    def _sleep(self, *args: object) -> None:
        time.sleep(self._random.random() * 2e-3)


@pytest.mark.parametrize("name", ["zb_v", "interleaved_1f1b"])
def test_delays_inside_actions_change_nothing(name: str) -> None:
    schedule = registry.build(name, ranks=4, microbatches=7 if name == "zb_v" else 8)
    assert_equals_one_process(schedule, 24, clip_norm=0.05, prepare=Delayed())


def make_tied() -> nn.Sequential:
    torch.manual_seed(7)
    embedding = nn.Embedding(11, 6)
    block = nn.Linear(6, 6)
    middle = [block, nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), block, nn.Tanh()]
    return nn.Sequential(embedding, *middle, Unembed(embedding.get_parameter("weight")))


def make_tokens() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, 11, (2, 14, 5), generator=generator)) for _ in range(4)]


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v", "hanayo", "zb_h1", "varuna"])
def test_tied_weights_equal_one_process(name: str, data: int) -> None:
    """On the V they meet on one rank, else on two; a norm counts them once."""
    schedule = registry.build(name, ranks=2, microbatches=4)
    options: dict[str, Any] = {
        "count": 4,
        "clip_norm": 0.05,
        "optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    }
    model = make_tied()
    expected = train(model, token_loss, make_tokens(), replicas=data, **options)
    losses, weights = train_in_threads(
        make_tied, token_loss, make_tokens(), pipeline=2, data=data, schedule=schedule, **options
    )
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=0)
    ties = find_ties(layers_of(make_tied(), 0))
    own = make_tied()
    own.load_state_dict(with_all_names(weights, ties))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(own.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_a_tied_weight_that_meets_on_one_rank_travels_nowhere() -> None:
    schedule = registry.build("zb_v", ranks=2, microbatches=4)
    models = [make_tied() for _ in range(2)]

    def run(transport: ThreadTransport) -> tuple[bool, set[int]]:
        engine = make_engine(
            models[transport.rank], token_loss, transport,
            schedule=schedule, pipeline=2, data=1, count=4, optimizer=partial(torch.optim.SGD, lr=0.1),
        )  # fmt: skip
        shared = {number for number, held in enumerate(engine.tied_gradients) if "0.weight" in held.names}
        assert not any("0.weight" in held.names for held in engine.gradients.values())
        first, last = engine.stages.get(0), engine.stages.get(3)
        return first is not None and last is not None and first.layers[0].weight is last.layers[-1].weight, shared

    here, there = run_ranks(2, run)
    assert here[0], "one parameter, used by two stages"
    assert len(here[1]) == 1, "with one gradient, of neither stage alone"
    assert there == (False, set())


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v", "varuna"])
def test_dropout_is_that_of_one_rank(name: str) -> None:
    """Keyed by step, micro-batch and layer: the same numbers wherever a layer is, and when it runs again."""

    def model() -> nn.Module:
        torch.manual_seed(2)
        built = gpt.build(vocab_size=11, sequence_length=6, width=8, layers=3, heads=2, dropout=0.2)
        return nn.Sequential(*(source.build() for source in layers_of(built, 0)))

    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(11, (8, 6), generator=generator) for _ in range(2)]
    batches = [(t, t.roll(-1, 1)) for t in tokens]
    options: dict[str, Any] = {"data": 1, "count": 4, "optimizer": adamw}
    expected = train_in_threads(model, token_loss, batches, schedule="1f1b", pipeline=1, **options)
    schedule = registry.build(name, ranks=2, microbatches=4)
    made = train_in_threads(model, token_loss, batches, schedule=schedule, pipeline=2, **options)
    assert made[0][0] == expected[0][0]
    assert all(torch.equal(made[1][key], value) for key, value in expected[1].items())


def test_validation_and_prediction_run_forward_through_all_chunks() -> None:
    schedule = registry.build("zb_v", ranks=2, microbatches=4)
    models = [make_model() for _ in range(2)]
    batch = make_batches(10)[0]

    def run(transport: ThreadTransport) -> Any:
        engine = make_engine(
            models[transport.rank], functional.cross_entropy, transport,
            schedule=schedule, pipeline=2, data=1, count=4, optimizer=adamw,
        )  # fmt: skip
        part = part_of(batch, transport, 2, 1, schedule)
        return engine.evaluate(part), engine.predict(part)

    whole = make_model().eval()
    expected = whole(batch[0])
    loss = functional.cross_entropy(expected, batch[1]).item()
    (first, output), (second, nothing) = run_ranks(2, run)
    assert nothing is None, "rank 0 has the last stage"
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert first == second
    assert first[1] == 10
    assert first[0] / first[1] == pytest.approx(loss, rel=1e-6)


def test_a_recomputed_forward_keeps_no_graph_and_runs_twice() -> None:
    schedule = in_order(looping(2, 1), 3, ahead=3, recomputed=[0])
    models = [make_model() for _ in range(2)]
    saved: dict[int, list[str]] = {0: [], 1: []}

    def run(transport: ThreadTransport) -> list[str]:
        engine = make_engine(
            models[transport.rank], functional.cross_entropy, transport,
            schedule=schedule, pipeline=2, data=1, count=3, optimizer=adamw,
        )  # fmt: skip
        calls = saved[transport.rank]
        next(iter(engine.stages.values())).register_forward_hook(lambda *_: calls.append("forward"))
        engine.submit(part_of(make_batches(6)[0], transport, 2, 1, schedule))
        engine.drain()
        return [f"{event.stage}{event.op}{event.microbatch}" for event in engine.timeline.events[-1][1]]

    assert run_ranks(2, run) == [[str(action) for action in row] for row in schedule.actions]
    assert [len(saved[rank]) for rank in (0, 1)] == [6, 3]


def test_what_is_fused() -> None:
    def row(*actions: str) -> tuple[Action, ...]:
        return tuple(map(parse_action, actions))

    rows = (row("0F0", "3F0", "3I0", "3W0", "0I0", "0W0"), row("1F0", "2F0", "2I0", "2W0", "1I0", "1W0"))
    schedule = Schedule("v", ((0, 1, 1, 0),), (0,), rows, chunks=2)
    assert fuse_backwards(schedule).actions == (
        row("0F0", "3F0", "3I0", "3W0", "0B0"),  # rank 1 waits for 3I0, nobody for 0I0
        row("1F0", "2F0", "2B0", "1I0", "1W0"),  # 1I0 runs after 2W0 anyway, rank 0 waits for it
    )
