"""Small rank functions that stand in for training: each is called on every rank with the config and the directory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError
from runner.record import RunRecord, StepLog, step_seconds


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def succeed(config: RunConfig, run_dir: Path) -> None:
    total = torch.tensor([float(_rank() + 1)])
    if dist.is_initialized():
        dist.all_reduce(total)
    if _rank() == 0:
        (run_dir / "total.txt").write_text(str(total.item()))
        (run_dir / "threads.txt").write_text(str(torch.get_num_threads()))
        RunRecord(status="ok", steps=2, loss=[2.0, 1.0]).save(run_dir)
    else:
        print(f"hello from rank {_rank()}")


def step_forever(config: RunConfig, run_dir: Path) -> None:
    """Steps with a collective in each, as training has; ignores SIGTERM as a rank inside a collective would."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run_dir / f"pid_{_rank()}").write_text(str(os.getpid()))
    log = StepLog(run_dir) if _rank() == 0 else None
    if _rank() == 0:
        RunRecord(status="running").save(run_dir)
    for step in range(1, 10_000):
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        if log is not None:
            log.write(step=step, loss=1.0 / step, seconds=0.01)
        time.sleep(0.01)


def step_until_told(config: RunConfig, run_dir: Path) -> None:
    """As :func:`step_forever`, with the ordinary answer to SIGTERM."""
    (run_dir / f"pid_{_rank()}").write_text(str(os.getpid()))
    if _rank() == 0:
        RunRecord(status="running").save(run_dir)
    while True:
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        time.sleep(0.01)


def save_when_told(config: RunConfig, run_dir: Path) -> None:
    """Step until SIGTERM, and record that the run has saved then."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    (run_dir / f"pid_{_rank()}").write_text(str(os.getpid()))
    while not told:
        time.sleep(0.01)
    if _rank() == 0:
        RunRecord(status="interrupted", steps=7).save(run_dir)


def last_rank_raises(config: RunConfig, run_dir: Path) -> None:
    if _rank() == dist.get_world_size() - 1:
        raise ValueError("the user's model is broken\nsecond line")
    dist.all_reduce(torch.ones(1))


def last_rank_refuses(config: RunConfig, run_dir: Path) -> None:
    if _rank() == dist.get_world_size() - 1:
        raise RequestError([Problem("data.batch_size", 3, "must be even", "", "data.batch_size=4")])
    dist.all_reduce(torch.ones(1))


def last_rank_is_out_of_memory(config: RunConfig, run_dir: Path) -> None:
    if _rank() == dist.get_world_size() - 1:
        torch.empty(1 << 60, dtype=torch.uint8)
    dist.all_reduce(torch.ones(1))


def crash_where_lr_is_large(config: RunConfig, run_dir: Path) -> None:
    if config.optimizer.lr > 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    record = RunRecord.load(run_dir)
    seconds = record.step_seconds | step_seconds([0.1])
    record.replace(status="ok", steps=1, loss=[config.optimizer.lr], step_seconds=seconds).save(run_dir)
