"""What fails when all steps are taken costs neither the steps nor their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from resume_runs import record_of, run_here, train
from safetensors.torch import load_file

import runner.training.finish
from runner.checkpoint.file import read_checkpoint
from runner.errors import RunFailedError

RUN = ("trainer.max_steps=3", "checkpoint.every=null", "trainer.val_every=null")


class Fails(pl.Callback):
    """Fails in a hook, after the last step, on one rank or on all."""

    def __init__(self, hook: str, rank: int | None = None) -> None:
        def fail(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if rank in (None, trainer.global_rank):
                raise ValueError(f"{hook} of a user's")

        vars(self)[hook] = fail


class FailingLogger(CSVLogger):
    def finalize(self, status: str) -> None:
        raise OSError("no connection")


def logger(directory: str) -> FailingLogger:
    return FailingLogger(directory)


def failing(hook: str, rank: int | None = None) -> str:
    where = f"hook:{hook}" + (f",rank:{rank}" if rank is not None else "")
    return "+callbacks.fails={target:test_failures_at_the_end:Fails,kwargs:{" + where + "}}"


def same_weights(one: Path, other: Path) -> bool:
    left, right = (load_file(each / "weights.safetensors") for each in (one, other))
    kept = read_checkpoint(one / "checkpoints" / "step-3.ckpt")["state_dict"]
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and torch.equal(kept[name], right[name]) for name in left
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a failure, in this process."""
    place = tmp_path_factory.mktemp("ends") / "whole"
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, place, *RUN)
    return place


@pytest.mark.costly
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end", "teardown"])
def test_a_callback_that_fails_at_the_end(
    hook: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"{hook} of a user's"):
        run_here(monkeypatch, tmp_path / "run", *RUN, failing(hook))
    assert same_weights(tmp_path / "run", whole)
    made = record_of(tmp_path / "run")
    assert made["steps"] == len(made["loss"]) == 3
    assert made["status"] != "ok"


def test_a_logger_that_fails_at_the_end(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("logger.target=test_failures_at_the_end:logger", f"+logger.kwargs.directory={tmp_path}")
    with pytest.raises(OSError, match="no connection"):
        run_here(monkeypatch, tmp_path / "run", *RUN, "logger.name=custom", *own)
    assert same_weights(tmp_path / "run", whole)


def test_pictures_that_fail_fail_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*args: Any) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(runner.training.finish, "draw_timelines", draw)
    assert run_here(monkeypatch, tmp_path / "run", *RUN)["status"] == "ok"


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_last_checkpoint_that_cannot_be_written_leaves_the_weights(
    asynchronous: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*args: Any) -> None:
        raise RunFailedError("the disk is full")

    monkeypatch.setattr("runner.training.checkpoints.write_checkpoint", write)
    monkeypatch.setattr("runner.training.checkpoints.write_part", write)
    with pytest.raises(RunFailedError, match="the disk is full"):
        run_here(monkeypatch, tmp_path / "run", *RUN, f"checkpoint.asynchronous={asynchronous}")
    left, right = (load_file(place / "weights.safetensors") for place in (tmp_path / "run", whole))
    assert all(torch.equal(left[name], right[name]) for name in right)
    assert record_of(tmp_path / "run")["artifacts"].keys() & {"weights", "checkpoint"} == {"weights"}


@pytest.mark.costly
@pytest.mark.parametrize(("hook", "rank"), [("on_train_end", None), ("on_train_epoch_end", 1)])
def test_two_ranks_save_although_a_callback_fails_at_the_end(
    hook: str, rank: int | None, whole: Path, tmp_path: Path
) -> None:
    done = train(tmp_path / "run", *RUN, "parallelism.pipeline=2", failing(hook, rank))
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("rank " if rank is None else f"rank {rank} ")
    assert f"ValueError: {hook} of a user's (test_failures_at_the_end.py:" in last
    assert same_weights(tmp_path / "run", whole)
    assert record_of(tmp_path / "run")["status"] == "failed"
