"""What a run shows of itself while it trains."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.utils.data import DataLoader

from runner.engine.measure.timeline import StepTimes
from runner.plan.values import RunPlan
from runner.training.data.loading import StepSampler, samples_of_step
from runner.training.measure.shared import SharedFigures
from runner.training.progress import Progress, ProgressLine, shown

WHOLE = Progress(
    10_000, 20_000, seconds_left=7533, loss=2.34567, rate=12_345, unit="tokens/s", mfu=0.342, bubble=0.123,
    peak_bytes=45_600_000_000,
)  # fmt: skip


def test_a_line_has_everything_and_fits_80_columns() -> None:
    long = "step 10000/20000  2:05:33 left  loss 2.3457  12.3k tokens/s  MFU 34%  bubble 12%  peak 45.6 GB"
    assert shown(WHOLE) == long
    assert shown(replace(WHOLE, mfu=None), 80) == long.replace("MFU 34%  ", "").replace("  ", " ")
    assert shown(WHOLE, 79) == long.replace("  ", " ").removesuffix(" peak 45.6 GB")
    assert shown(WHOLE, 12) == "step 10000/2"


def test_what_is_not_known_is_not_shown() -> None:
    assert shown(Progress(0, 20)) == "step 0/20"
    one_rank = Progress(20, 20, seconds_left=0.0, loss=1.5, rate=43.0, peak_bytes=11_000_000)
    assert shown(one_rank) == "step 20/20  loss 1.5000  43.0 samples/s  peak 11.0 MB"
    assert shown(Progress(4, 9, loss=1.5, validating=3)) == "step 4/9  validation batch 3  loss 1.5000"
    assert shown(Progress(4, 9, loss=1.5, grad_norm=0.25)) == "step 4/9  loss 1.5000  grad norm 0.250"
    assert shown(Progress(4, 9, seconds_left=249.6)) == "step 4/9  4:10 left"


def test_numbers_have_three_digits() -> None:
    shown_rates = [shown(Progress(1, 1, rate=rate)).split()[2] for rate in (0.0512, 9.996, 517.2, 999.7, 12_345, 2e6)]
    assert shown_rates == ["0.0512", "10.0", "517", "1.00k", "12.3k", "2.00M"]


def test_the_last_step_of_an_epoch_counts_its_own_samples() -> None:
    sampler = StepSampler.__new__(StepSampler)
    sampler.length, sampler.batch_size, sampler.drop_last = 20, 8, False
    loader = cast("DataLoader[Any]", SimpleNamespace(batch_sampler=sampler))
    assert [samples_of_step(loader, 8, batch) for batch in range(5)] == [8, 8, 4, 8, 8]


def _plan(ranks: int, replicas: int = 1) -> RunPlan:
    """A plan of so many ranks."""
    schedule = SimpleNamespace(is_asynchronous=False, windows=1)
    topology = SimpleNamespace(coordinates=lambda rank: SimpleNamespace(data=rank % replicas))
    several = {"layout": {"world_size": ranks}, "has_bubble": ranks > replicas}
    return cast(RunPlan, SimpleNamespace(**several, schedule=schedule, topology=topology))


def _times(rank: int, steps: int) -> list[StepTimes]:
    """Steps of 4 seconds, in which rank 0 computes for 3 and rank 1 for 1."""
    return [
        StepTimes(at, first_compute=4.0 * at, last_compute=4.0 * at + 4, compute=(3.0, 1.0)[rank], end=4.0 * at + 4)
        for at in range(steps)
    ]


def test_rank_0_knows_the_bubble_and_the_peak_of_all_ranks() -> None:
    store = HashStore()
    first, second = (SharedFigures(_plan(2), rank, store) for rank in range(2))
    first.update(_times(0, 1), 100)
    assert (first.bubble, first.peak_bytes) == (None, 100), "nobody has told anything yet"
    second.update(_times(1, 1), 300)
    first.update(_times(0, 2), 100)
    assert (first.bubble, first.peak_bytes) == (0.5, 300)
    assert second.bubble is None


def test_replicas_do_not_wait_for_one_another_in_the_bubble() -> None:
    store = HashStore()
    plan = _plan(4, replicas=2)
    ranks = [SharedFigures(plan, rank, store) for rank in range(4)]
    for rank in (3, 2, 1, 0):  # replica 1 computes 7 s later, and each of its ranks for half of its second
        start, compute = 7.0 * (rank % 2), 0.5 if rank % 2 else 1.0
        ranks[rank].update([StepTimes(0, first_compute=start, last_compute=start + 1, compute=compute, end=8.0)], 1)
    assert ranks[0].bubble == 0.25


def test_replicas_of_one_stage_have_no_bubble_but_a_peak() -> None:
    store = HashStore()
    ranks = [SharedFigures(_plan(2, replicas=2), rank, store) for rank in range(2)]
    for rank in (1, 0):
        ranks[rank].update(_times(rank, 1), 100 + rank)
    assert (ranks[0].bubble, ranks[0].peak_bytes) == (None, 101)


def test_ranks_whose_steps_are_short_tell_seldom_and_of_the_same_steps() -> None:
    store = HashStore()
    first, second = (SharedFigures(_plan(2), rank, store) for rank in range(2))
    steps = [
        [
            StepTimes(at, first_compute=0.1 * at, last_compute=0.1 * at + 0.1, compute=0.05, end=0.1 * at)
            for at in range(64)
        ]
        for _ in range(2)
    ]
    told = []
    for count in range(1, 65):
        first.update(steps[0][:count], 1)
        before = store.get("figures/1") if store.check(["figures/1"]) else None
        second.update(steps[1][:count], 1)
        told += [count] if store.get("figures/1") != before else []
    assert told == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert first.bubble == pytest.approx(0.5)


def test_one_rank_has_no_bubble() -> None:
    alone = SharedFigures(_plan(1), 0, None)
    alone.update(_times(0, 3), 7)
    assert (alone.bubble, alone.peak_bytes) == (None, 7)


def test_a_log_line_stands_above_the_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = io.StringIO()
    line = ProgressLine(cast(Any, None), _plan(1), cast(Any, None), terminal)
    monkeypatch.setattr(line, "progress", lambda *_: Progress(1, 2))
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    trainer = cast(Any, SimpleNamespace(global_step=1, max_steps=1))
    line.on_train_start(trainer, cast(Any, None))
    line.on_train_batch_end(trainer)
    logging.getLogger().warning("a warning")
    line.on_train_end(trainer, cast(Any, None))
    assert terminal.getvalue() == "\r\x1b[Kstep 1/2\r\x1b[Ka warning\n\r\x1b[Kstep 1/2\n"
    assert not handler.filters
