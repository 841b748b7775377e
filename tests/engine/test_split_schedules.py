"""Schedules of the user's own with I and W, from a CSV file, give what one process gives."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of, train_in_threads
from reference import train
from torch import nn

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.layers import layers_of
from runner.schedule.catalogue import registry
from runner.schedule.render.table import to_csv
from runner.schedule.values import Action, Op, Schedule
from runner.zoo import gpt

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)

V_SHAPE = """\
0F0,,,0F1,3F0,3I0,3F1,3I1,3W0,3W1,0I0,0I1,0W0,0W1
1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1
"""


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))


def make_batches(batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 6, generator=generator), torch.randint(0, 5, (batch,), generator=generator))
        for _ in range(3)
    ]


def delayed(row: tuple[Action, ...], delay: int) -> list[Action]:
    """``row`` with each B as I, and its W when ``delay`` others wait; the rest at the end."""
    actions: list[Action] = []
    waiting: deque[Action] = deque()
    for action in row:
        if action.op is not Op.B:
            actions.append(action)
            continue
        actions.append(action._replace(op=Op.I))
        waiting.append(action._replace(op=Op.W))
        if len(waiting) > delay:
            actions.append(waiting.popleft())
    return [*actions, *waiting]


def from_file(text: str, folder: Path, ranks: int, count: int, chunks: int = 1) -> Schedule:
    path = folder / "schedule.csv"
    path.write_text(text)
    schedule = registry.build("from_file", ranks=ranks, microbatches=count, chunks=chunks, file=str(path))
    assert isinstance(schedule, Schedule)
    return schedule


def split(name: str, folder: Path, ranks: int, count: int, delay: int, whole: tuple[int, ...] = ()) -> Schedule:
    """A named schedule with its backwards split on all ranks but ``whole``, by way of a file."""
    base = registry.build(name, ranks=ranks, microbatches=count)
    assert isinstance(base, Schedule)
    rows = [row if rank in whole else tuple(delayed(row, delay)) for rank, row in enumerate(base.actions)]
    text = to_csv(Schedule(base.name, base.placement, base.pipeline_of_microbatch, tuple(rows)))
    return from_file(text, folder, ranks, count)


def assert_equals_one_process(
    schedule: Schedule, ranks: int, count: int, *, data: int = 1, batch: int = 16, dtype: torch.dtype = torch.float32
) -> None:
    options: dict[str, Any] = {"count": count, "clip_norm": 0.05, "optimizer": adamw, "dtype": dtype}
    expected_model = make_model()
    loss = nn.functional.cross_entropy
    expected = train(expected_model, loss, make_batches(batch), replicas=data, by_replica=True, **options)
    losses, weights = train_in_threads(
        make_model, loss, make_batches(batch), pipeline=ranks, data=data, schedule=schedule, **options
    )
    assert all(rank == expected for rank in losses)
    state = expected_model.state_dict()
    assert weights.keys() == state.keys()
    assert [name for name in state if not torch.equal(weights[name], state[name])] == []


@pytest.mark.parametrize("delay", [0, 1, 2, 99])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_split_schedules_equal_one_process(name: str, ranks: int, delay: int, tmp_path: Path) -> None:
    assert_equals_one_process(split(name, tmp_path, ranks, 4, delay), ranks, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("batch", [13, 2])
def test_uneven_and_empty_microbatches_and_replicas(batch: int, data: int, dtype: torch.dtype, tmp_path: Path) -> None:
    schedule = split("1f1b", tmp_path, 3, 4, 2)
    assert_equals_one_process(schedule, 3, 4, data=data, batch=batch * data, dtype=dtype)


@pytest.mark.parametrize("whole", [(0,), (1,), (0, 2)])
def test_some_ranks_split_and_others_do_not(whole: tuple[int, ...], tmp_path: Path) -> None:
    assert_equals_one_process(split("1f1b", tmp_path, 3, 5, 2, whole), 3, 5)


def test_two_stages_per_rank_hand_over_on_the_rank(tmp_path: Path) -> None:
    schedule = from_file(V_SHAPE, tmp_path, 2, 2, chunks=2)
    assert schedule.placement == ((0, 1, 1, 0),)
    assert_equals_one_process(schedule, 2, 2)


def test_a_gpt_with_dropout_equals_its_unsplit_self(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(2)
        built = gpt.build(vocab_size=11, sequence_length=6, width=8, layers=2, heads=2, dropout=0.2)
        return nn.Sequential(*(source.build() for source in layers_of(built, 0)))

    def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(11, (8, 6), generator=generator) for _ in range(2)]
    batches = [(t, t.roll(-1, 1)) for t in tokens]
    options: dict[str, Any] = {"pipeline": 2, "data": 1, "count": 4, "optimizer": adamw}
    expected = train_in_threads(model, loss, batches, schedule="1f1b", **options)
    made = train_in_threads(model, loss, batches, schedule=split("1f1b", tmp_path, 2, 4, 2), **options)
    assert made[0] == expected[0]
    assert all(torch.equal(made[1][name], value) for name, value in expected[1].items())


def test_the_timeline_has_i_and_w_and_the_engine_holds_nothing_afterwards(tmp_path: Path) -> None:
    schedule = split("1f1b", tmp_path, 2, 3, 1)
    models = [make_model() for _ in range(2)]

    def run(transport: ThreadTransport) -> list[str]:
        engine = make_engine(
            models[transport.rank], nn.functional.cross_entropy, transport,
            schedule=schedule, pipeline=2, data=1, count=3, optimizer=adamw,
        )  # fmt: skip
        engine.submit(part_of(make_batches(6)[0], transport, 2, 1))
        engine.drain()
        return [f"{event.stage}{event.op}{event.microbatch}" for event in engine.timeline.events[-1][1]]

    assert run_ranks(2, run) == [[str(action) for action in row] for row in schedule.actions]
