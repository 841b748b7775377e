"""Actions are those of torch's own generators, exported and compared cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from narrow import present
from torch.distributed.pipelining import schedules as theirs

from runner.schedule import SPECS, build

NAMES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def _order(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    """What torch's class plans for each rank, without its blanks; it needs no process group for that."""
    schedule = getattr(theirs, NAMES[name])
    planner: Any = schedule.__new__(schedule)
    rounds = max(1, microbatches // ranks)
    vars(planner).update(
        pp_group_size=ranks,
        _n_microbatches=microbatches,
        _stages=[SimpleNamespace(stage_index=chunk) for chunk in range(chunks)],
        _num_stages=ranks * chunks,
        num_stages=ranks * chunks,
        n_local_stages=chunks,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    return [list(_cells(planner._calculate_single_rank_operations(rank))) for rank in range(ranks)]


def _cells(actions: list[Any]) -> Iterator[str]:
    """A pair that torch overlaps is written as its two actions, as ours is."""
    for action in actions:
        if action is not None:
            yield from map(str, action.sub_actions or [action])


def _sizes() -> Iterator[tuple[str, int, int, int]]:
    for name in NAMES:
        spec = SPECS[name]
        for ranks in (2, 3, 4):
            for chunks in (each for each in (1, 2, 3) if spec.chunks.holds(ranks, each)):
                for microbatches in (1, ranks - 1, ranks, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 3 * ranks + 3):
                    if spec.microbatches.holds(ranks, microbatches):
                        yield name, ranks, microbatches, chunks


@pytest.mark.parametrize("name", NAMES)
def test_order_is_torchs(name: str) -> None:
    for _, ranks, microbatches, chunks in (size for size in _sizes() if size[0] == name):
        mine = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        assert [[str(action) for action in row] for row in mine.actions] == _order(name, ranks, microbatches, chunks), (
            ranks,
            microbatches,
            chunks,
        )


def test_torch_fuses_and_we_do_not() -> None:
    """torch merges I and W that stand together as it lowers. Ours stay apart in the schedule; what runs them fuses."""
    mine = build("zb_v", ranks=2, microbatches=4).actions[0]
    kinds = {"F": theirs.FORWARD, "I": theirs.BACKWARD_INPUT, "W": theirs.BACKWARD_WEIGHT}
    merged = theirs._merge_bw([theirs._Action(a.stage, kinds[str(a.op)], a.microbatch) for a in mine])
    assert len(merged) < len(mine)
    apart = [cell.replace("B", op) for cell in map(str, merged) for op in ("IW" if "B" in cell else "F")]
    assert apart == [str(action) for action in mine]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 4), (3, 8), (4, 8)])
def test_the_classical_orders_are_torchs(ranks: int, microbatches: int) -> None:
    """torch's own description of the order, of the ranks where it describes what it runs.

    For the last rank of 1F1B, torch 2.13 numbers the forwards from 1; so its backwards alone are compared there.
    """
    for name, cls in (("gpipe", theirs.ScheduleGPipe), ("1f1b", theirs.Schedule1F1B)):
        planner = cls.__new__(cls)
        planner._num_stages, planner._n_microbatches = ranks, microbatches
        order = present(planner._get_pipeline_order())
        for rank, row in enumerate(build(name, ranks=ranks, microbatches=microbatches).actions):
            cells = [str(cell) for cell in order[rank] if cell is not None and "REDUCE_GRAD" not in str(cell)]
            mine = [str(action) for action in row]
            if name == "1f1b" and rank == ranks - 1:
                cells = [cell for cell in cells if "B" in cell]
                mine = [cell for cell in mine if "B" in cell]
            assert mine == cells, (name, rank)
