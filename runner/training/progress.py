"""Shows how far a run is: one line that changes on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from runner.config.perplexity import counts_tokens, perplexity
from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.plan.values import RunPlan
from runner.training.callbacks import StepClock

__all__ = ["Progress", "ProgressLine", "ProgressLines", "progress", "shown"]

logger = logging.getLogger(__name__)

_LINES_PER_RUN = 20
_SECONDS_PER_LINE = 60.0
_SECONDS_PER_CHANGE = 0.1
_LATEST = 20  # steps over which rates are means
_CLEAR = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; None is what is not known.

    Args:
        step, total: steps that are done, and all steps.
        seconds_left: until the last step, without validations.
        loss: the loss of the last step that has ended.
        rate, unit: how many of what the latest steps took per second.
        mfu: model FLOPs utilization of the latest steps, from 0 to 1.
        bubble: the bubble of all ranks in the latest steps.
        grad_norm: the norm of all gradients of that step, where it is computed.
        peak_bytes: peak memory of the fullest rank.
        of_peak: what that counts: on a CPU the tensors alone, without the rest of the process.
        validating: the batch of a validation that is under way.
    """

    step: int
    total: int
    seconds_left: float | None = None
    loss: float | None = None
    rate: float | None = None
    unit: str = "samples/s"
    mfu: float | None = None
    bubble: float | None = None
    grad_norm: float | None = None
    peak_bytes: int = 0
    of_peak: str = "peak"
    validating: int | None = None


def shown(progress: Progress, width: int | None = None) -> str:
    """The progress as one line; if it must fit ``width`` columns, what stands last is left out first."""
    parts = [f"step {progress.step}/{progress.total}", *_parts(progress)]
    line = "  ".join(parts)
    if width is None or len(line) <= width:
        return line
    while len(parts) > 1 and len(" ".join(parts)) > width:
        parts.pop()
    return " ".join(parts)[:width]


def _parts(progress: Progress) -> Iterator[str]:
    if progress.validating is not None:
        yield f"validation batch {progress.validating}"
    elif progress.seconds_left is not None and progress.step < progress.total:
        yield f"{_clock_time(progress.seconds_left)} left"
    if progress.loss is not None:
        yield f"loss {progress.loss:.4f}"
    if progress.grad_norm is not None:
        yield f"grad norm {_short(progress.grad_norm)}"
    if progress.rate is not None:
        yield f"{_short(progress.rate)} {progress.unit}"
    if progress.mfu is not None:
        yield f"MFU {progress.mfu:.0%}"
    if progress.bubble is not None:
        yield f"bubble {progress.bubble:.0%}"
    if progress.peak_bytes:
        yield f"{progress.of_peak} {format_bytes(progress.peak_bytes)}"


def _of_peak(trainer: pl.Trainer) -> str:
    meter = getattr(trainer.strategy, "meter", None)
    return "tensors" if meter is not None and meter.kind == "tensor_bytes" else "peak"


def _clock_time(seconds: float) -> str:
    """``4:09`` or ``12:04:09``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(number: float) -> str:
    """Three digits: ``0.512``, ``43.1``, ``12.3k``."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * scale:
            return f"{number / scale:#.3g}{letter}".replace(".k", "k").replace(".M", "M").replace(".G", "G")
    return f"{number:#.3g}".rstrip(".")


class _Shown(Callback):
    """Knows the progress of a run.

    Args:
        config, plan: the request and its plan.
        clock: has measured the steps; it stands before this callback.
    """

    def __init__(self, config: RunConfig, plan: RunPlan, clock: StepClock) -> None:
        self._config = config
        self._plan = plan
        self._clock = clock

    def progress(self, trainer: pl.Trainer, validating: int | None = None) -> Progress:
        walls, samples = self._clock.walls[-_LATEST:], self._clock.samples[-_LATEST:]
        step, total = trainer.global_step, trainer.max_steps
        if validating is not None or not walls or not sum(samples):
            return Progress(step, total, loss=self._clock.loss, validating=validating)
        whole_step = sum(walls) / sum(samples) * self._config.data.batch_size  # the last one of an epoch may be smaller
        tokens = self._plan.work.tokens_per_second(whole_step)
        return Progress(
            step,
            total,
            seconds_left=(total - step) * sum(walls) / len(walls),
            loss=self._clock.loss,
            rate=tokens if tokens is not None else self._config.data.batch_size / whole_step,
            unit="samples/s" if tokens is None else "tokens/s",
            mfu=self._plan.work.mfu(whole_step),
            grad_norm=self._clock.grad_norm,
            bubble=self._clock.figures.bubble,
            peak_bytes=self._clock.figures.peak_bytes,
            of_peak=_of_peak(trainer),
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        figures = {"loss": getattr(pl_module, "val_losses", []), **getattr(pl_module, "val_metrics", {})}
        last = {name: values[-1] for name, values in figures.items() if values}
        now = [f"val_{name} {value:.4f}" for name, (at, value) in last.items() if at == step]
        if "loss" in last and last["loss"][0] == step and counts_tokens(self._config.loss.name, self._plan.work.tokens):
            now.insert(1, f"perplexity {_short(perplexity(last['loss'][1]))}")
        if now:
            logger.info("%s", "  ".join([f"step {step}", *now]))


class ProgressLines(_Shown):
    """Logs a line of progress now and then, for output that is not a terminal; fewer without ``trainer.progress``."""

    def __init__(self, config: RunConfig, plan: RunPlan, clock: StepClock) -> None:
        super().__init__(config, plan, clock)
        self._told = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        step, total, now = trainer.global_step, trainer.max_steps, time.monotonic()
        often = self._config.trainer.progress and step % max(1, total // _LINES_PER_RUN) == 0
        if often or step == total or now - self._told > _SECONDS_PER_LINE:
            self._told = now
            logger.info("%s", shown(self.progress(trainer)))


class ProgressLine(_Shown):
    """One line on a terminal that changes; what is logged meanwhile stands above it."""

    def __init__(self, config: RunConfig, plan: RunPlan, clock: StepClock, terminal: TextIO | None = None) -> None:
        super().__init__(config, plan, clock)
        self._terminal = terminal if terminal is not None else sys.stderr
        self._line = ""
        self._written = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for handler in logging.getLogger().handlers:
            handler.addFilter(self._make_room)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self._write(trainer, at_once=trainer.global_step == trainer.max_steps)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        *_: int,
    ) -> None:
        self._write(trainer, batch_idx + 1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._write(trainer, at_once=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, at_once=True)
        self._end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def _write(self, trainer: pl.Trainer, validating: int | None = None, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._written >= _SECONDS_PER_CHANGE:
            self._written = now
            self._line = shown(self.progress(trainer, validating), _columns(self._terminal) - 1)
            self._terminal.write(_CLEAR + self._line)
            self._terminal.flush()

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Remove the line from the terminal, because a log line is about to be written there."""
        if self._line:
            self._terminal.write(_CLEAR)
            self._terminal.flush()
        return True

    def _end(self) -> None:
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._make_room)
        if self._line:
            self._terminal.write("\n")
            self._terminal.flush()
            self._line = ""


def _columns(terminal: TextIO) -> int:
    """The terminal's width, or 80 if it does not say."""
    try:
        return int(os.environ.get("COLUMNS", "")) or 80
    except ValueError:
        pass
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except OSError:
        return 80


def progress(config: RunConfig, plan: RunPlan, clock: StepClock, rank: int) -> list[Callback]:
    """The callback that shows a rank's progress: only rank 0 has one, and a line that changes needs a terminal."""
    if rank != 0:
        return []
    kind = ProgressLine if config.trainer.progress and sys.stderr.isatty() else ProgressLines
    return [kind(config, plan, clock)]
