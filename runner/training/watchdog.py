"""A thread on every rank that notices when the rank makes no progress, reports where it is, and lets others see it.

The rank's pulse (:mod:`runner.pulse`) goes on while this thread sees progress, so that the supervisor also notices what
stops this thread: native code that holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from runner.pulse import NO_PROGRESS, Phase, PollClock, Pulse
from runner.record import RunRecord, finish_failed, hang_file, write_atomically
from runner.strategy.pipeline import EngineStrategy

__all__ = ["Watchdog"]

logger = logging.getLogger(__name__)

_POLLS = 10  # polls until a report
_MOST_SECONDS = 1.0  # between two polls
_SILENT = "does not say where it is, as one that hangs outside Python"
_WAITS = ", waiting for other ranks"
_RUNNER = str(Path(__file__).parents[1])
# Whose code waits for other ranks.
_WAITING = (
    *(f"{_RUNNER}{os.sep}{room}{os.sep}" for room in ("engine", "strategy")),
    os.sep.join(("torch", "distributed")),
)
_GRACE_SECONDS = 2.0  # ranks do not get stuck at the same moment: time for the others to report


class Watchdog(Callback):
    """Writes ``logs/rank_<n>.hang.txt`` if nothing happens for a while, and ends the rank if that continues.

    Progress means an action of the engine, or a step or batch of Lightning's loop. Time is counted in polls, so that a
    process that was stopped, or a machine that slept, goes on as if nothing had happened.

    Args:
        run_dir: the run's directory.
        rank, num_ranks: the rank of this process, and the number of ranks.
        report_seconds: seconds without progress until place and stacks are written; may be infinite.
        end_seconds: seconds without progress until the process ends, or during a save its limit; may be infinite.
    """

    def __init__(self, run_dir: Path, rank: int, num_ranks: int, report_seconds: float, end_seconds: float) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._num_ranks = num_ranks
        self._report_seconds = min(report_seconds, end_seconds)
        self._end_seconds = end_seconds
        self._beats = 0
        self._done = threading.Event()
        self._main = threading.main_thread().ident
        self._strategy: EngineStrategy | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, EngineStrategy)
        self._strategy = trainer.strategy
        with contextlib.suppress(OSError):
            hang_file(self._run_dir, self._rank).unlink(missing_ok=True)
        Pulse.current().enter(Phase.STEP)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def on_train_batch_start(self, *args: Any) -> None:
        self._beats += 1

    def on_train_batch_end(self, *args: Any) -> None:
        self._beats += 1

    def on_validation_batch_end(self, *args: Any) -> None:
        self._beats += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching, because the steps have ended; harmless if it has not started."""
        self._done.set()
        Pulse.current().enter(Phase.EXIT)

    def _watch(self) -> None:
        clock = PollClock()
        seen, since, reported = self._progress(), 0.0, False
        poll = min(self._report_seconds / _POLLS, _MOST_SECONDS)
        while not self._done.wait(poll):
            now, still = self._progress(), clock.tick() - since
            if now != seen:
                seen, since, reported = now, clock.now, False
                Pulse.current().beat(sum(now[:2]))
                continue
            if still >= self._report_seconds and not reported:
                reported = True
                self._report(still)
            if still >= max(self._end_seconds, self._patience()):
                self._end(still)

    def _progress(self) -> tuple[int, int, float]:
        engine = self._strategy.engine if self._strategy is not None else None
        return self._beats, engine.actions_begun if engine is not None else 0, self._patience()

    def _patience(self) -> float:
        """The limit of what all ranks do together now, e.g. a save, which begins no action; 0 within steps."""
        return self._strategy.patience_seconds if self._strategy is not None else 0.0

    def _report(self, still: float) -> None:
        """Write where this rank is in the first line, then the schedule and the stacks of all its threads."""
        engine = self._strategy.engine if self._strategy is not None else None
        place, picture = engine.place() if engine is not None else ("before the first step", "")
        frames = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = sys._current_frames()
        where = _doing(stacks[self._main]) if self._main in stacks else ""
        lines = [f"rank {self._rank} {place}{where}", "", picture, ""]
        for ident, frame in stacks.items():
            lines += [f"thread {frames.get(ident, ident)}", "".join(traceback.format_stack(frame))]
        Pulse.current().say(lines[0])
        file = hang_file(self._run_dir, self._rank)
        try:
            write_atomically(file, "\n".join(lines) + "\n")
        except OSError as error:
            logger.warning(f"{NO_PROGRESS} %.0f s: %s; %s could not be written (%s)", still, lines[0], file, error)
        else:
            logger.warning(f"{NO_PROGRESS} %.0f s: %s; see %s", still, lines[0], file)

    def _end(self, still: float) -> None:
        if self._done.wait(_GRACE_SECONDS):
            return
        places = [_told_by(self._run_dir, rank) for rank in range(self._num_ranks)]
        reason = f"{NO_PROGRESS} {still:.0f} s: {'; '.join(_causes_first(places))}"
        Pulse.current().say(f"{reason}\n{places[self._rank]}")
        file = hang_file(self._run_dir, self._rank)
        try:
            write_atomically(file, f"{reason}\n\n{file.read_text(encoding='utf-8')}")
            if RunRecord.load(self._run_dir).status == "running":
                finish_failed(self._run_dir, "failed", reason)
        except (OSError, ValueError) as error:  # the supervisor reads the pulse
            logger.warning("%s; it could not be recorded (%s)", reason, error)
        os._exit(1)


def _told_by(run_dir: Path, rank: int) -> str:
    """The line in which a rank says where it is; the reason of its end may stand above that line."""
    try:
        text = hang_file(run_dir, rank).read_text(encoding="utf-8")
    except OSError:
        text = Pulse.current().said_by(rank)
    return next((line for line in text.splitlines() if line.startswith(f"rank {rank} ")), "")


def _causes_first(places: Sequence[str]) -> list[str]:
    """What each rank says of itself, most likely cause first: one that can say nothing, and last those that wait."""
    said = [place or f"rank {rank} {_SILENT}" for rank, place in enumerate(places)]
    return sorted(said, key=lambda place: (place.endswith(_WAITS), not place.endswith(_SILENT)))


def _doing(frame: Any) -> str:
    """What a thread does, in words: that it waits for other ranks, or where it is in the user's own code."""
    frames = traceback.extract_stack(frame)
    return _WAITS if _is_waiting(frames) else _innermost(frames)


def _is_waiting(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the engine waits for a message: between its own code and the system there is at most Python's library."""
    inner = next((one.filename for one in reversed(frames) if not _is_of_python(one.filename)), "")
    return any(part in inner for part in _WAITING)


def _is_of_python(filename: str) -> bool:
    return f"{os.sep}lib{os.sep}python" in filename and "site-packages" not in filename


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost frame of the user's own code, outside packages and the runner."""
    own = [one for one in frames if "site-packages" not in one.filename and not one.filename.startswith(("<", _RUNNER))]
    own = [one for one in own if not _is_of_python(one.filename)]
    return f", at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
