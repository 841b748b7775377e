"""callbacks=: what a user's callback decides, all ranks do."""

from __future__ import annotations

from pathlib import Path

import pytest
import user_callbacks
from covering import sampled
from user_project import make_directory, record, train

STOPPING = (
    "callbacks=early_stopping", "metrics.constant=mine_too:constant", "trainer.val_every=1", "trainer.max_steps=9",
    "callbacks.early_stopping.kwargs.monitor=val_constant", "callbacks.early_stopping.kwargs.patience=2",
)  # fmt: skip
LAYOUTS = {
    "single": (),
    "pipeline": ("parallelism.pipeline=2",),
    "data": ("parallelism.data=2",),
    "both": ("parallelism.pipeline=2", "parallelism.data=2"),
    "asynchronous": ("parallelism.pipeline=2", "schedule=pipedream_2bw", "schedule.microbatches=2"),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = make_directory(tmp_path)
    text = Path(str(user_callbacks.__file__)).read_text(encoding="utf-8")
    (made / "mine_too.py").write_text(text, encoding="utf-8")
    return made


@pytest.mark.costly
@pytest.mark.parametrize("layout", sampled(LAYOUTS, "both", "asynchronous"))
def test_early_stopping_ends_all_ranks_at_one_step(directory: Path, layout: str) -> None:
    """The first validation is the best one; two more without a better one are the patience."""
    done = train(directory, *STOPPING, *LAYOUTS[layout])
    assert done.returncode == 0, done.stderr
    made = record(directory / "run")
    assert (made["status"], made["steps"], len(made["val_loss"])) == ("ok", 3, 3)
    assert "a callback has ended the run after step 3 of 9" in done.stderr
    assert [each.name for each in (directory / "run" / "checkpoints").iterdir()] == ["step-3.ckpt"]


@pytest.mark.costly
def test_its_patience_goes_on_in_a_resumed_run(directory: Path) -> None:
    assert train(directory, *STOPPING, "trainer.max_steps=2").returncode == 0
    done = train(directory, *STOPPING, "resume=auto", "parallelism.pipeline=2")
    assert done.returncode == 0, done.stderr
    assert record(directory / "run")["steps"] == 3


@pytest.mark.costly
@pytest.mark.parametrize(("layout", "last"), [("single", 3), ("both", 3), ("asynchronous", 4)])
def test_what_one_rank_asks_within_training_ends_all_a_step_later(directory: Path, layout: str, last: int) -> None:
    """Where windows overlap, the next step has begun already."""
    words = ("callbacks.stop.target=mine_too:StopOnOneRank", "callbacks.stop.kwargs.step=2", "trainer.max_steps=9")
    done = train(directory, *words, *LAYOUTS[layout])
    assert done.returncode == 0, done.stderr
    assert (record(directory / "run")["status"], record(directory / "run")["steps"]) == ("ok", last)


@pytest.mark.costly
def test_every_rank_has_what_callbacks_monitor(directory: Path) -> None:
    words = ("callbacks.seen.target=mine_too:Seen", "metrics.constant=mine_too:constant")
    done = train(directory, *words, *LAYOUTS["both"])
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert {"loss", "val_loss", "val_constant"} <= {*(directory / f"seen_{rank}.txt").read_text().split()}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("callbacks=early_stopping",), "EarlyStopping: needs trainer.val_every."),
        (("callbacks=early_stoping",), "Try callbacks=early_stopping."),
        (("callbacks.a.kwargs.b=1",), "callbacks.a.target = ???: must be package.module:Class."),
        (
            ("callbacks.a.target=mine_too:NoCallback",),
            "must make a callback of lightning.pytorch. It made a NoCallback",
        ),
        (("callbacks.a.target=mine_too:Sen",), "Try callbacks.a.target=mine_too:Seen."),
        (
            ("callbacks.a.target=lightning.pytorch.callbacks:ModelCheckpoint",),
            "callbacks.a.target = lightning.pytorch.callbacks:ModelCheckpoint: cannot be used in a run.",
        ),
        (
            ("callbacks.a.target=mine_too:Misspelt",),
            "must have its hook as on_validation_end. Lightning calls no method on",
        ),
        (("callbacks.a.target=mine_too:StopOnOneRank",), "missing 1 required positional argument: 'step'"),
    ],
)
def test_what_cannot_be_made_is_refused(directory: Path, words: tuple[str, ...], told: str) -> None:
    done = train(directory, *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (directory / "run").exists()


def test_a_figure_that_nobody_logs_is_told_before_the_first_step(directory: Path) -> None:
    done = train(directory, *STOPPING, "callbacks.early_stopping.kwargs.monitor=val_accuracy")
    assert done.returncode == 2
    told = "callbacks.early_stopping.kwargs.monitor = val_accuracy: must be logged. The run logs loss, lr,"
    assert told in done.stderr
    assert "val_loss, val_constant." in done.stderr
    assert not (directory / "run").exists()
