"""One rank of a pipeline: batches in, finished optimizer steps out.

The engine is a stream: :meth:`Engine.submit` takes one step's batch and returns the steps that it finished (for
flushed schedules, that one), :meth:`Engine.drain` finishes what is under way. Ranks are not synchronised between
steps: the first stage may work on the next step while the others finish this one.

A step's loss and gradients are sums over micro-batches and replicas, divided once by the summed weight, at STEP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.engine.actions.curvature import ScheduledCurvature
from runner.engine.chains import Chains
from runner.engine.context import RankView
from runner.engine.executor import Executor
from runner.engine.failure import describe_place, draw_place, explain_failure
from runner.engine.measure.nonfinite import Finding, Watcher, first_over, replayed
from runner.engine.measure.timeline import Timeline
from runner.engine.opening import Opening
from runner.engine.options import EngineOptions, FinishedStep, TakenBack
from runner.engine.stream import Stream
from runner.engine.transport.base import Transport
from runner.engine.transport.watched import WatchedTransport
from runner.engine.update.gradients import StageGradients
from runner.engine.update.sharding import ShardedUpdate, Sharding
from runner.engine.update.step_end import Backup, StepEnd
from runner.engine.update.ties import TiedWeight, group_by_holders
from runner.engine.update.twins import compare_twins
from runner.engine.update.update import Update
from runner.engine.window import StepBatch, Window, join_microbatches
from runner.model.data import LossFunction
from runner.model.layers import StageModule
from runner.schedule.lowering.speculate import speculation
from runner.schedule.values import Action, Payload, Program

__all__ = ["Engine", "EngineOptions", "FinishedStep"]


class Engine:
    """See the module's text.

    Args:
        view: where this rank stands.
        training, forward_only: the lowered programs of training, one step or a stream of several that repeats, and of
            a validation window.
        stages: this rank's stage modules by stage.
        loss: the loss function.
        transport: how messages travel.
        options: what the run fixes.
        tied: this rank's copies of weights that several stages hold.
        sharding: keeps and applies the gradients of this rank's one stage together with its other replicas.
        keep: makes the gradients of a stage.
    """

    def __init__(
        self,
        *,
        view: RankView,
        training: Program,
        forward_only: Program,
        stages: Mapping[int, StageModule],
        loss: LossFunction,
        transport: Transport,
        options: EngineOptions,
        tied: Sequence[TiedWeight] = (),
        sharding: Sharding | None = None,
        keep: Callable[[Sequence[tuple[str, torch.nn.Parameter]]], StageGradients] = StageGradients,
    ) -> None:
        self.view = view
        self.stages = dict(stages)
        self.options = options
        self.transport = transport = WatchedTransport(transport) if training.schedule.ahead else transport
        shared = {id(weight.parameter) for weight in tied}
        self._sharding = sharding
        self.gradients = {stage: keep(_named_parameters(module, shared)) for stage, module in stages.items()}
        for stage in view.later_copies:
            self.gradients[stage].counted = False
        self._tied = group_by_holders(tied)
        self.gradients |= {-1 - number: gradients for number, gradients in enumerate(self._tied)}  # of no stage alone
        self._stream = Stream(view, training, forward_only, options.microbatches)
        self.update = self._make_update()
        self._step = 0
        self._begin_step: Callable[[], None] | None = None
        self._stop_requested = False
        self._finished: list[FinishedStep] = []
        self._executor = Executor(
            view=view,
            stages=self.stages,
            gradients=self.gradients,
            loss=loss,
            transport=transport,
            schedules={True: training.schedule, False: forward_only.schedule},
            dtype=options.dtype,
            autocast=options.autocast,
            seed=options.seed,
            on_losses=self._losses_known,
            sharding=sharding,
            on_step=self._finish_step,
        )
        self._chains = Chains(view, training.schedule.placement, transport)
        self._opening = Opening(
            view, self._stream, self._chains, microbatches=options.microbatches, all_take_part=sharding is not None
        )
        self._beginning = speculation(training)
        self._end = StepEnd(
            options=options,
            update=self.update,
            chains=self._chains,
            reductions=self._finish_reductions,
            timeline=lambda: self.timeline,
            find_nonfinite=self._find_nonfinite,
        )

    def _make_update(self) -> Update:
        if self._sharding is not None:
            return ShardedUpdate(self._sharding, self.transport, self.options.scaling)
        return Update(
            gradients=self.gradients,
            pipeline=self.view.pipeline,
            transport=self.transport,
            clip_norm=self.options.clip_norm,
            clip_value=self.options.clip_value,
            scaling=self.options.scaling,
        )

    @property
    def timeline(self) -> Timeline:
        return self._executor.timeline

    @property
    def first_copies(self) -> dict[int, StageModule]:
        """This rank's stages without twins whose first copy is elsewhere in its pipeline: those that go into files."""
        return {stage: module for stage, module in self.stages.items() if stage not in self.view.later_copies}

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes this rank sent in training steps so far: of activations, also lent or sent twice, and of gradients."""
        sent = self._executor.bytes_sent
        activations = sum(count for payload, count in sent.items() if payload is not Payload.GRADIENT)
        return {"activation": activations, "gradient": sent[Payload.GRADIENT]}

    def attach_optimizer(
        self,
        apply_update: Callable[[], None],
        master_of: Callable[[Tensor], torch.nn.Parameter] | None = None,
        backup: Backup | None = None,
        begin: Callable[[], None] | None = None,
        curvature: ScheduledCurvature | None = None,
    ) -> None:
        """Set what updates the weights from ``parameter.grad``.

        Args:
            master_of: the fp32 master of a weight, whose ``grad`` is set in place of the weight's; None: no masters.
            backup: takes an update back; post-validation needs one.
            begin: called before the first forward of a training step; None: most see nothing of it but its end.
            curvature: does K-FAC's work where the schedule has it.

        Raises:
            ValueError: the schedule has such work, and there is nothing to do it.
        """
        schedule = self._stream.schedule(training=True)
        if curvature is None and schedule.has_curvature:
            raise ValueError(f"{schedule.name} needs K-FAC: its schedule has K-FAC's work")
        self._executor.curvature = curvature
        self.update.attach(apply_update, master_of)
        self._end.backup = backup
        self._begin_step = begin

    @property
    def curvature(self) -> ScheduledCurvature | None:
        """What does K-FAC's work, where that has its place in the schedule."""
        return self._executor.curvature

    @property
    def windows(self) -> int:
        """Steps after which the training program repeats itself."""
        return self._stream.windows

    @property
    def taken_back(self) -> list[TakenBack]:
        """Steps that were reported and then taken back; whoever reads them may clear the list."""
        return self._end.taken_back

    def start_at(self, step: int) -> None:
        """Set the index of the next step, after a resume."""
        self._step = step

    @property
    def actions_begun(self) -> int:
        """How many actions of all windows this rank has begun: what grows where there is progress."""
        return self._executor.begun

    def place(self) -> tuple[str, str]:
        """The last action that this rank has begun, in words and in the picture of the schedule."""
        action = self._executor.current
        if action is None:
            return "before its first action", ""
        program = self._stream.program(self._executor.training)
        picture = draw_place(program, self.view, self._in_program(action))
        return f"in step {self._step + 1}, last at {describe_place(action, self.stages)}", picture

    def request_stop(self) -> None:
        """Ask all ranks to stop at the end of the next step that begins here; safe in a signal handler."""
        self._stop_requested = True

    def submit(self, batch: StepBatch) -> list[FinishedStep]:
        """Run one training window.

        Raises:
            RunFailedError: an action failed (with the schedule's picture), the loss is not finite, or twins differ.
        """
        self.timeline.begin(self._step, time.perf_counter())
        if self._begin_step is not None:
            self._begin_step()
        if self.curvature is not None:
            self.curvature.begin(self._stream.window(self._step))
        window = self._open(batch, training=True)
        actions = self._stream.training(self._step)
        begun = self._begin_next(window, actions) if self._end.is_pending else 0
        self._run(window, actions[begun:])
        self._executor.require_empty()
        self.timeline.finish(time.perf_counter())
        self._step += 1
        if self.view.has_twins and self._step % self.options.twin_check_every == 0:
            compare_twins(self.view, self.stages, self.transport, self._step)
        finished, self._finished = self._finished, []
        return finished

    def evaluate(self, batch: StepBatch) -> tuple[float, float]:
        """Run one forward-only window; this pipeline's ``(sum, weight)`` of the loss, on each of its ranks."""
        window = self._forward_only(batch, with_loss=True)
        return float(window.loss[0]), float(window.loss[1])

    def predict(self, batch: StepBatch) -> Any:
        """Run one forward-only window without loss; the last layer's output for all samples, None on other ranks."""
        window = self._forward_only(replace(batch, targets=None), with_loss=False)
        outputs = [window.outputs[microbatch] for microbatch in sorted(window.outputs)]
        return join_microbatches(outputs) if outputs else None

    def _forward_only(self, batch: StepBatch, *, with_loss: bool) -> Window:
        self.settle()
        for module in self.stages.values():
            module.eval()
        self.timeline.begin(self._step, time.perf_counter())  # so that no training step gets these times
        window = self._open(batch, training=False)
        self._run(window, self._stream.forward_only())
        if with_loss:
            self._chains.totals(window.loss)
        self.drain()
        for module in self.stages.values():
            module.train()
        return window

    def rehearse(self, batch: StepBatch, windows: int) -> Timeline:
        """Run training windows without their update, to measure; weights, buffers and gradients stay as they were.

        Returns:
            the times of these windows, which the engine's own timeline does not keep.
        """
        kept = self._copy_buffers()
        own, self._executor.timeline = self._executor.timeline, Timeline()
        actions = self._stream.without_update()
        for _ in range(windows):
            self.timeline.begin(-1, time.perf_counter())
            window = self._open(batch, training=True)
            self._run(window, actions)
            self._chains.totals(window.loss)
            self.timeline.finish(time.perf_counter())
        self.drain()
        self.update.close()
        self._load_buffers(kept)
        self._executor.bytes_sent = dict.fromkeys(self._executor.bytes_sent, 0)
        measured, self._executor.timeline = self._executor.timeline, own
        return measured

    def drain(self) -> None:
        """Finish what is under way; afterwards the engine holds no activation and no message."""
        self.settle()
        self._executor.drain()
        self._chains.drain()

    # One window

    def _run(self, window: Window, actions: Sequence[Action]) -> None:
        def failed(action: Action, error: Exception) -> Exception:
            program = self._stream.program(window.training)
            shapes = self._executor.describe(action)
            return explain_failure(error, program, self.view, self._in_program(action), shapes, self.stages)

        for gradients in self.gradients.values():
            gradients.claim()
        with self.transport.exclusive():
            random_state = torch.get_rng_state()
        self._executor.run(window, actions, failed)
        with self.transport.exclusive():  # ranks in threads share the generator: not between another's seed and its use
            torch.set_rng_state(random_state)

    def _open(self, batch: StepBatch, training: bool) -> Window:
        window = self._opening.open(
            batch,
            step=self._step,
            training=training,
            stop=self._stop_requested,
            loss_scale=self.update.scale.of_sum,
            timeline=self.timeline,
        )
        if self._sharding is not None and training:
            self._sharding.begin(self.options.microbatches)
        self._losses_known(window)  # where no forward of this replica will say so: it has no sample
        return window

    def _in_program(self, action: Action) -> Action:
        """An action of the window that runs, as its program numbers it."""
        return self._stream.in_program(action, self._step) if self._executor.training else action

    def _copy_buffers(self) -> dict[str, Tensor]:
        return {name: value.clone() for module in self.stages.values() for name, value in _named_buffers(module)}

    def _load_buffers(self, copies: Mapping[str, Tensor]) -> None:
        for module in self.stages.values():
            for name, value in _named_buffers(module):
                value.copy_(copies[name])

    # STEP

    def _finish_step(self, window: Window) -> None:
        self._finished.append(self._end.finish(window))

    def _finish_reductions(self, window: Window) -> None:
        """Wait for the sums over replicas, of the loss too, and over holders of tied weights."""
        self._executor.reductions += [each for group in self._tied for each in group.start(self.transport)]
        totals = window.loss.to(self.transport.device)
        if len(self.view.replicas) > 1:
            self._executor.reductions.append(self.transport.all_reduce(totals, self.view.replicas))
        for handle in self._executor.reductions:
            handle.wait()
        self._executor.reductions.clear()
        window.loss.copy_(totals)

    def settle(self) -> None:
        """Wait until the last step can no longer be taken back: whoever reads the weights comes after this.

        What K-FAC keeps of micro-batches is summed, and what it has summed is in the optimizer's states.
        """
        self._end.settle()
        if self.curvature is not None:
            self.curvature.settle()

    def _begin_next(self, window: Window, actions: Sequence[Action]) -> int:
        """What of a window needs no verdict on the last step, then the verdict; how many actions that were."""
        length = self._beginning.lengths[self.view.position]
        own_buffers = self._copy_buffers()
        self._run(window, actions[:length])

        def drop() -> None:
            self._executor.abandon(window, self._beginning.in_flight[self.view.position])

        if self._end.settle(drop):
            self._load_buffers(own_buffers)
            window.begin_again(self.update.scale.of_sum)
            self._run(window, actions[:length])
        self._losses_known(window)
        return length

    def _losses_known(self, window: Window) -> None:
        """Tell the other ranks the loss, unless it may have to be computed again."""
        if window.targets is not None and not window.losses_to_come and not self._end.is_pending:
            self._chains.send_totals(window)
            window.losses_to_come = -1

    def _find_nonfinite(self, window: Window) -> Finding | None:
        """Play the window again, looking at every layer; the first finding of all ranks, on each of them."""

        def number() -> int:
            action = self._executor.current
            return self.view.first_microbatch + (action.microbatch or 0 if action is not None else 0)

        watcher = Watcher(self.stages, self.gradients, number)
        actions = self._stream.without_update()
        eager = torch.compiler.set_stance("force_eager") if self.options.compile else nullcontext()
        if self._sharding is not None:
            self._sharding.begin(self.options.microbatches)
        with watcher.watching(), self._executor.with_loss(watcher.check_loss), eager:
            self._run(replayed(window), actions)
        watcher.check_sums()
        self.update.close()
        return first_over(watcher.found, self.transport, (self.view.pipeline, self.view.replicas))


def _named_parameters(module: StageModule, left_out: set[int]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(module.global_name(n), p) for n, p in module.named_parameters() if id(p) not in left_out]


def _named_buffers(module: StageModule) -> list[tuple[str, Tensor]]:
    return [(module.global_name(name), value) for name, value in module.named_buffers()]
