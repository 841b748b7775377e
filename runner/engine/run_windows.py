"""Opens the windows of one rank and runs their actions; an action that fails is explained.

Windows are run again to find where a value that is not finite was made; that changes no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeAlias

import torch
from torch.utils.weak import WeakIdRef

from runner.engine.context import RankContext
from runner.engine.executor import Executor
from runner.engine.failure import describe_place, draw_place, explain_failure
from runner.engine.headers import Headers
from runner.engine.nonfinite import Finding, Watcher, first_over, replayed
from runner.engine.open_window import WindowOpener
from runner.engine.options import EngineOptions
from runner.engine.step_ends import StepEnds
from runner.engine.stream import RankStream
from runner.engine.update.stage_update import NotFiniteError, NothingCountsError
from runner.engine.window import StepBatch, Window
from runner.errors import RunFailedError
from runner.model.buffers import BufferSnapshot, ChangedBuffers
from runner.model.layers import StageModule
from runner.model.seeds import mix_seed, seed_generators
from runner.schedule.values import Action

__all__ = ["WindowRunner", "copy_buffers", "states_of_buffers"]

Stages: TypeAlias = Mapping[int, StageModule]


class WindowRunner:
    """Runs the windows of one rank.

    Args:
        rank: the place of the rank, its stages, and the windows that have begun.
        stream: the rank's actions.
        headers: passes sizes from rank to rank.
        ends: ends the steps.
        executor: runs actions.
        options: the settings of the run.

    Attributes:
        step: the index of the step whose batch is opened next.
        since: the first step that has begun since the pipeline was last empty.
    """

    def __init__(
        self,
        rank: RankContext,
        stream: RankStream,
        headers: Headers,
        ends: StepEnds,
        executor: Executor,
        options: EngineOptions,
    ) -> None:
        self.step = 0
        self.since = 0
        self._rank, self._stream, self._ends, self._executor = rank, stream, ends, executor
        self._options = options
        self._opener = WindowOpener(
            rank.view,
            stream,
            headers,
            microbatches=options.microbatches,
            shares=options.shares,
            all_take_part=rank.sharding is not None,
            num_metrics=sum(metric.num_rows for metric in options.metrics),
            num_figures=sum(figure.num_rows for figure in options.figures),
        )
        self._is_training = True  # whether the last window was of training

    def open(self, batch: StepBatch, *, training: bool, asks: int = 0, place: int | None = None) -> Window:
        """Begin the window of a batch.

        Args:
            batch: this rank's part of the batch.
            training: whether it is trained on.
            asks: what this rank asks of all.
            place: the place of the window among those under way; None: that of the step.

        Raises:
            RunFailedError: ranks loaded different samples, or are at different steps.
        """
        window = self._opener.open(
            batch,
            step=self.step,
            training=training,
            asks=asks,
            loss_scale=self._ends.update.scale.of_sum,
            timeline=self._rank.timeline,
        )
        microbatches = self._options.microbatches
        if place is not None:
            window.first = place * microbatches
        self._rank.windows[window.first // microbatches] = window
        if self._rank.sharding is not None and training:
            self._rank.sharding.begin(microbatches)
        self._ends.send_loss(window)  # a replica without samples has no forward that would do this
        return window

    def run(self, actions: Sequence[Action], *, training: bool = True) -> None:
        """Run actions of the windows that have begun.

        Raises:
            RunFailedError: an action failed; the text shows the schedule, or where a value was first not finite.
        """

        def failed(action: Action, error: Exception) -> Exception:
            if isinstance(error, NotFiniteError):
                return self._say_where(error)
            program, shapes = self._stream.program(training), self._executor.describe(action)
            return explain_failure(error, program, self._rank.view, self._in_program(action), shapes, self._rank.stages)

        self._is_training = training
        for gradients in self._ends.all_gradients:
            gradients.claim()
        transport = self._rank.transport
        with transport.exclusive():
            random_state = torch.get_rng_state()
        ended = self.step - 1  # a step that fails leaves the generators as the step before it did
        try:
            self._executor.run(actions, failed, training=training)
            ended = self.step
        finally:
            with transport.exclusive():  # ranks in threads share the generator: wait for other ranks' use of it
                seed_generators(mix_seed(self._options.seed, ended))  # of Python and NumPy, alike on all ranks
                torch.set_rng_state(random_state)

    def close_ended(self) -> None:
        """Remove the windows whose stages have all been updated; their buffers must be empty.

        Raises:
            RuntimeError: a buffer of such a window is left.
        """
        for place, window in list(self._rank.windows.items()):
            if not window.waits_for_step:
                self._executor.require_empty(window)
                del self._rank.windows[place]

    def settle(self, drop: Callable[[], None] | None = None) -> bool:
        """Wait until the last step can no longer be undone; see :meth:`runner.engine.step_ends.StepEnds.settle`.

        Raises:
            RunFailedError: the step is neither finite nor to be skipped.
        """
        try:
            return self._ends.settle(drop)
        except NotFiniteError as error:
            raise self._say_where(error) from error

    def place(self) -> tuple[str, str]:
        """The last action that this rank has begun, in words and as a picture of the schedule."""
        action = self._executor.current
        if action is None:
            return "before its first action", ""
        program = self._stream.program(self._is_training)
        picture = draw_place(program, self._rank.view, self._in_program(action))
        return f"in step {self.step + 1}, last at {describe_place(action, self._rank.stages)}", picture

    def _say_where(self, error: NotFiniteError) -> RunFailedError:
        """The error that ends the run at a step that is not finite; it says where the first such value was made."""
        if isinstance(error, NothingCountsError):
            # Where windows overlap, stages are updated one by one, and no step can be skipped.
            advice = "" if self._stream.overlap else "; trainer.on_nonfinite=skip goes on without its update"
            step = error.window.step + 1
            return RunFailedError(f"step {step}: {error.what}{advice}; the weights are those of the step before")
        found = self._find_nonfinite(error.window)
        where = "; every layer was finite when the step ran again"
        if found is not None:
            where = f"; first not finite: {found.what}"
        elif self._stream.overlap:
            where = ""
        step = error.window.step + 1
        return RunFailedError(f"step {step}: {error.what}{where}; the weights are those of the step before")

    def _in_program(self, action: Action) -> Action:
        """An action of the present windows, with the numbers of its program."""
        return self._stream.in_program(action, self.step, self.since) if self._is_training else action

    def _find_nonfinite(self, window: Window) -> Finding | None:
        """Run the window again, checking every layer; return the first finding of all ranks, on each of them.

        Return None if windows overlap, because messages of other windows are on their way.
        """
        if self._stream.overlap:
            return None
        rank, view = self._rank, self._rank.view

        def number() -> int:
            action = self._executor.current
            return view.first_microbatch + (action.microbatch or 0 if action is not None else 0)

        watcher = Watcher(rank.stages, self._ends.all_gradients, number)
        actions = self._stream.without_update()
        eager = torch.compiler.set_stance("force_eager") if self._options.compile else nullcontext()
        if rank.sharding is not None:
            rank.sharding.begin(self._options.microbatches)
        rank.windows[0] = replayed(window)
        with watcher.watching(), self._executor.with_loss(watcher.check_loss), eager:
            self.run(actions)
        watcher.check_sums()
        self._ends.update.close()
        return first_over(watcher.found, rank.transport, (view.shards, view.pipeline, view.replicas))


def copy_buffers(stages: Stages) -> BufferSnapshot:
    """Copies of the buffers of stages, e.g. running statistics, which can be put back after forwards."""
    return ChangedBuffers(stages.values()).snapshot()


def states_of_buffers(stages: Stages) -> list[tuple[WeakIdRef, int]]:
    """The identity of each buffer and how often it was changed, to see whether forwards have changed one."""
    return [(WeakIdRef(value), value._version) for module in stages.values() for value in module.buffers()]
