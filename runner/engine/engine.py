"""The engine of one rank of a pipeline: it takes batches and returns finished optimizer steps.

The engine is a stream: :meth:`Engine.submit` takes one step's batch and returns the steps that ended. With a flushed
schedule this is the same step, with an asynchronous one perhaps an earlier step. :meth:`Engine.drain` finishes the
steps that have begun. Ranks are not synchronised between steps: the first stage may work on the next step while the
others finish this one.

A step's loss and gradients are sums over micro-batches and replicas; at STEP they are divided once by the summed
weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from runner.engine.asks import SAVE, STOP
from runner.engine.context import RankContext
from runner.engine.executor import Executor
from runner.engine.headers import Headers
from runner.engine.measure.clocks import clock_of
from runner.engine.measure.timeline import Timeline
from runner.engine.options import EngineOptions, FinishedStep, TakenBack
from runner.engine.rank_view import RankView
from runner.engine.run_windows import WindowRunner, copy_buffers, states_of_buffers
from runner.engine.step_ends import StepEnds
from runner.engine.stream import RankStream
from runner.engine.transport.base import Transport
from runner.engine.transport.counting import SentBytes
from runner.engine.transport.tensor_group import TensorGroup
from runner.engine.transport.watched import WatchedTransport
from runner.engine.update.copies import compare_copies
from runner.engine.update.gradients import StageGradients
from runner.engine.update.reducer import Reducer
from runner.engine.update.sets import Keep
from runner.engine.update.sharding import Sharding
from runner.engine.update.stage_update import Backup
from runner.engine.update.update import Update
from runner.engine.update.waves import OwnGradients, make_waves
from runner.engine.weights.make import keep_gradients, make_stores
from runner.engine.weights.pipelines import PipelineWeights
from runner.engine.weights.predicted import Foresight, PredictedWeights
from runner.engine.window import StepBatch, Window, join_microbatches
from runner.engine.work import Filler, Work, Works
from runner.engine.works.host import HostMoves
from runner.engine.works.lent import Lent
from runner.engine.works.versioned import Versioned
from runner.memory.apply.drive import DriveFolder
from runner.memory.apply.install import StageOffload
from runner.memory.apply.weight_swap import WeightSwap
from runner.model.data import LossFunction
from runner.model.kept_state import KeptState
from runner.model.layers import StageModule
from runner.model.modes import evaluating
from runner.model.tags import ParameterTag, named_parameters
from runner.plan.prediction import Prediction
from runner.schedule.lowering.speculate import speculation
from runner.schedule.values import Action, Payload, Program

__all__ = ["Engine", "EngineOptions", "FinishedStep"]

logger = logging.getLogger(__name__)


class Engine:
    """Runs one rank of a pipeline, see the module's text.

    Args:
        view: the place of this rank.
        training, forward_only: the lowered programs of training (one step, or a stream of several that repeats) and
            of a validation window.
        stages: this rank's stage modules by stage.
        loss: the loss function.
        transport: sends and receives messages.
        options: the settings of the run.
        tags: describes each of this rank's parameters, by global name.
        sharding: keeps and applies the gradients of this rank's one stage together with its other replicas.
        tensor_group: what this rank exchanges with those that divide its layers with it; None: none does.
        keep: makes the gradients of a stage.
        prediction: the weights that are predicted; None: none are.
        offload: moves what stages save to the host's memory; None: it stays.
        swap: lends the device the weights that are at home in the host's memory; None: all weights stay on the device.

    Attributes:
        tags: describes each of this rank's parameters, by global name.
        swap: see above.
        stores: the weights of each stage whose forwards or backwards do not always use the newest ones.
        waves: the exchange of each stage, where replicas exchange changes of weights instead of gradients.
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
        tags: Mapping[str, ParameterTag],
        sharding: Sharding | None = None,
        tensor_group: TensorGroup | None = None,
        keep: Keep = StageGradients,
        prediction: Prediction | None = None,
        offload: StageOffload | None = None,
        swap: WeightSwap | None = None,
    ) -> None:
        schedule = training.schedule
        self.view, self.options = view, options
        self.stages, self.tags = dict(stages), dict(tags)
        self.transport = WatchedTransport(transport) if schedule.ahead else transport
        self.swap, self._host, self._sharding = swap, HostMoves(offload, swap), sharding
        self._begin_step: Callable[[], None] | None = None
        self._filler: Filler | None = None
        self._stop_requested = self._save_requested = False
        self._states_of_buffers: list[tuple[WeakIdRef, int]] = []  # before the last step
        self._stream = RankStream(view, training, forward_only, options.microbatches)
        self._loss, self._keep, self._prediction = loss, keep, prediction
        self._schedules = {True: schedule, False: forward_only.schedule}
        self._tensor_group = tensor_group
        self._attached: tuple[Any, ...] | None = None  # what the optimizer's part of a step was given
        self._make_parts(Timeline(clock_of(transport.device)))
        self._beginning = None if schedule.is_asynchronous else speculation(training)

    def _make_parts(self, timeline: Timeline) -> None:
        """Make all that follows from the stages."""
        view, options, schedule = self.view, self.options, self._schedules[True]
        self.stores = make_stores(self.stages, schedule, self._prediction)
        self.waves = make_waves(self.stages, schedule, self.transport, view.replicas)
        self._rank = RankContext(
            view,
            self.stages,
            self.transport,
            self._schedules,
            options.microbatches,
            self._sharding,
            self._tensor_group,
            timeline=timeline,
        )
        self._rank.speed = options.speeds[view.position] if options.speeds else 1.0
        self._headers = Headers(view, schedule.placement, self.transport)
        self._ends = StepEnds(
            self._rank,
            self._stream,
            self._headers,
            options,
            tags=self.tags,
            keep=keep_gradients(self._keep, self.stores),
            stores=self.stores,
            waves=self.waves,
        )
        if self.waves:
            self.reduce_by(lambda gradients: OwnGradients())
        self._executor = Executor(self._rank, self._works(), self._ends, loss=self._loss, options=options)
        self._runner = WindowRunner(self._rank, self._stream, self._headers, self._ends, self._executor, options)

    def let_go(self) -> None:
        """Free the gradients' buffers, before :meth:`hold`."""
        for gradients in self.all_gradients:
            gradients.let_go()

    def hold(self, stages: Mapping[int, StageModule], tags: Mapping[str, ParameterTag]) -> None:
        """Go on with other layers in the stages; all ranks call it between the same two steps, after :meth:`drain`.

        The rank keeps its place, its times and its counts. Plain steps alone are carried on: no older weights, no
        waves, no work in bubbles, no gradients that another object keeps, and no reducers of gradients.

        Args:
            stages: this rank's stage modules by stage, with the numbers of those before.
            tags: describes each of their parameters.
        """
        before = self._runner, self._executor, self._ends
        sent = [gradients.sent for gradients in self.all_gradients]
        self.stages, self.tags = dict(stages), dict(tags)
        self._make_parts(self.timeline)
        self._runner.step = self._runner.since = before[0].step
        self._executor.begun, self._executor.bytes_sent = before[1].begun, before[1].bytes_sent
        self._ends.stop_after, self._ends.save_after = before[2].stop_after, before[2].save_after
        self._ends.update.scale.load_state_dict(before[2].update.scale.state_dict())
        for each in sent:
            self.all_gradients[0].sent.add(each.num_bytes, each.messages)
        if self._attached is not None:
            self._ends.attach_optimizer(*self._attached)

    def _works(self) -> Works:
        works: list[Work] = []
        if self.stores:
            works.append(Versioned(self.stores))
        if self._stream.schedule(training=True).moves:
            works.append(Lent(self._rank))
        return Works([*works, *self._host.works(self._rank)])

    @property
    def gradients(self) -> dict[int, StageGradients]:
        """The gradients of each stage."""
        return self._ends.gradients

    @property
    def tied_gradients(self) -> list[StageGradients]:
        """The gradients of weights that several stages hold; they belong to no stage's gradients."""
        return self._ends.tied_gradients

    @property
    def all_gradients(self) -> list[StageGradients]:
        """All gradients of this rank: those of its stages, and those of weights that several stages hold."""
        return self._ends.all_gradients

    @property
    def update(self) -> Update:
        """The update that scales this rank's losses and gradients."""
        return self._ends.update

    @property
    def updating(self) -> int:
        """The step whose update is being applied; if windows overlap, not always the last submitted one."""
        return self._ends.updating

    @property
    def rate_factor(self) -> float:
        """The factor of the learning rate in the update that is being applied, of one stage if windows overlap.

        While rates are rescheduled, a stage whose forwards are tau > 1 steps late has the factor tau^(k/K - 1) at step
        k of K after the warm-up. Source: Yang et al., PipeMare, 2021, as the published AsyncPP code does it.
        """
        steps, schedule = self.options.rescheduling_steps, self._stream.schedule(training=True)
        begun = self.updating - self.options.warmup_steps
        if not steps or begun < 0 or not schedule.is_asynchronous:
            return 1.0
        late = max(schedule.lags[stage] for stage in self._ends.updating_stages) / schedule.window_size
        return float(late ** (min(begun / steps, 1.0) - 1.0)) if late > 1 else 1.0

    @property
    def speed(self) -> float:
        """How fast this rank computes, in parts of its real speed; below 1 if it emulates a slower device."""
        return self._rank.speed

    @property
    def timeline(self) -> Timeline:
        return self._rank.timeline

    @property
    def first_copies(self) -> dict[int, StageModule]:
        """This rank's stages whose first copy in its pipeline is on this rank; their buffers are saved in files."""
        return {stage: module for stage, module in self.stages.items() if stage not in self.view.later_copies}

    @property
    def saved_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that this rank saves in files for its pipeline, by global name."""
        own = named_parameters(self.stages)
        return {name: parameter for name, parameter in own.items() if self.tags[name].is_first_copy}

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank has sent in training steps: activations (also lent or sent twice), and gradients; bytes
        of activations that it has moved to the host's memory and back; those of weights that have come from there and
        of their gradients that have gone there; and those of layers that several ranks divide."""
        sent = self._executor.bytes_sent
        activations = sum(count for payload, count in sent.items() if payload is not Payload.GRADIENT)
        group = self._rank.tensor_group
        tensor = round(group.sent.num_bytes) if group is not None else 0
        return {
            "activation": activations,
            "gradient": sent[Payload.GRADIENT],
            "tensor": tensor,
            **self._host.bytes_moved,
        }

    def attach_optimizer(
        self,
        apply_update: Callable[[], None],
        master_of: Callable[[Tensor], torch.nn.Parameter] | None = None,
        backup: Backup | None = None,
        begin: Callable[[], None] | None = None,
        filler: Filler | None = None,
        foresight: Foresight | None = None,
        copies: Mapping[Tensor, Sequence[torch.nn.Parameter]] | None = None,
    ) -> None:
        """Set the function that updates the weights from ``parameter.grad``.

        Args:
            apply_update: updates every weight that has a gradient, for the step :attr:`updating`.
            master_of: returns the fp32 master of a weight, whose ``grad`` is set instead of the weight's; None: there
                are no masters.
            backup: undoes an update; post-validation needs one.
            begin: called before the first forward of a training step; most optimizers need no such call.
            filler: does the work that fills the schedule's bubbles, if it has such work.
            foresight: predicts weights from the optimizer's states, if some are predicted.
            copies: where pipelines train weights of their own, the optimizer's parameter of each pipeline, by weight.

        Raises:
            ValueError: the schedule has such work, but ``filler`` is missing.
        """
        schedule = self._stream.schedule(training=True)
        if filler is None and schedule.filling is not None:
            work = schedule.filling.work
            raise ValueError(f"{schedule.name} needs {work}: its schedule has {work}'s work")
        self._filler = filler
        if filler is not None:
            self._executor.attach(filler)
        self._attached = apply_update, master_of, backup
        self._ends.attach_optimizer(*self._attached)
        self._begin_step = begin
        for store in self.stores.values():
            if isinstance(store, PredictedWeights):
                store.foresight = foresight
            if isinstance(store, PipelineWeights) and copies is not None:
                store.share(copies)

    def reduce_by(self, make: Callable[[StageGradients], Reducer]) -> None:
        """Sum each stage's gradients with its own reducer; those of tied weights are summed without one."""
        for stage in self.stages:
            self.gradients[stage].reducer = make(self.gradients[stage])

    @property
    def shards(self) -> bool:
        """Whether another object keeps the gradients of this rank's stage, and perhaps parts of its weights."""
        return self._sharding is not None

    @property
    def filler(self) -> Filler | None:
        """The object that does the work which fills the schedule's bubbles, if it has such work."""
        return self._filler

    @property
    def step(self) -> int:
        """The index of the step whose batch is submitted next."""
        return self._runner.step

    @property
    def interval(self) -> int:
        """The number of steps after which the training program repeats itself."""
        return self._stream.interval

    @property
    def overlap(self) -> int:
        """How many further batches may be submitted before a step has ended on every rank."""
        return self._stream.overlap

    @property
    def taken_back(self) -> list[TakenBack]:
        """Steps that were reported and then undone; the reader may clear the list."""
        return self._ends.taken_back

    @property
    def stops(self) -> bool:
        """Whether no further batch shall be submitted: a rank asked to stop, and all ranks are at the same step."""
        return self._ends.stop_after is not None and self._runner.step > self._ends.stop_after

    @property
    def saves(self) -> bool:
        """Whether the run shall be saved before the next batch: a rank asked for it, and all are at the same step."""
        return self._ends.save_after is not None and self._runner.step == self._ends.save_after + 1

    def start_at(self, step: int) -> None:
        """Set the index of the next step, after a resume. The weights have version ``step``."""
        if step != self._runner.step:
            for store in self.stores.values():
                if store.newest != step:
                    store.start_at(step)
        self._runner.step = self._runner.since = step
        self._ends.stop_after = self._ends.save_after = None

    @property
    def actions_begun(self) -> int:
        """The number of actions that this rank has begun, over all windows; it grows while there is progress."""
        return self._executor.begun

    def place(self) -> tuple[str, str]:
        """The last action that this rank has begun, in words and as a picture of the schedule."""
        return self._runner.place()

    def request_stop(self) -> None:
        """Ask all ranks to stop at the end of the next step that this rank begins; safe in a signal handler."""
        self._stop_requested = True

    def request_save(self) -> None:
        """Ask all ranks to save at the end of the next step that this rank begins; see :attr:`saves`."""
        self._save_requested = True

    def submit(self, batch: StepBatch) -> list[FinishedStep]:
        """Run this rank's actions from one step's batch to the next batch.

        Returns:
            the steps that ended on this rank, in order; with a flushed schedule, the step of this batch.

        Raises:
            RunFailedError: an action failed (with the schedule's picture), the loss is not finite, or copies of weights
                on several ranks differ.
        """
        if self.options.offload_drive is not None:
            DriveFolder(self.options.offload_drive).require()
        self.timeline.begin(self._runner.step)
        self._states_of_buffers = states_of_buffers(self.stages)
        if self._begin_step is not None:
            self._begin_step()
        if self._filler is not None:
            self._filler.begin(self._stream.window(self._runner.step))
        window = self._runner.open(batch, training=True, asks=self._take_asks())
        actions = self._stream.training(self._runner.step, self._runner.since)
        begun = self._begin_next(window, actions) if self._ends.is_pending else 0
        self._runner.run(actions[begun:])
        self._runner.close_ended()
        self.timeline.finish()
        self._runner.step += 1
        if self._runner.step <= self.options.warmup_steps:
            self._empty()
        if self._runner.step % self.options.twin_check_every == 0:
            self.compare_copies()
        return self._ends.take_finished()

    def compare_copies(self) -> None:
        """Compare what several ranks hold; all ranks call it after the same step.

        Raises:
            RunFailedError: copies of a tensor differ; the ranks that hold it raise the error.
        """
        if self.waves and any(exchange.held for exchange in self.waves.values()):
            return  # replicas have different weights in the middle of a wave
        compare_copies(self.view, self.stages, self.tags, self.transport, self._runner.step)

    def evaluate(self, batch: StepBatch) -> tuple[float, float]:
        """Run one forward-only window; return this pipeline's ``(sum, weight)`` of the loss, on each of its ranks."""
        return self.validate(batch)[0]

    def validate(self, batch: StepBatch) -> list[tuple[float, float]]:
        """Run one forward-only window, as :meth:`evaluate`; return ``(sum, weight)`` of the loss, and of each metric.

        Metrics come in the order of the options.

        Raises:
            RequestError: a metric's function raises, or returns no number; on the last stage's ranks.
        """
        window = self._forward_only(batch, with_loss=True)
        return [(float(pair[0]), float(pair[1])) for pair in [window.loss, *window.metrics]]

    def predict(self, batch: StepBatch) -> Any:
        """Run one forward-only window without loss; return the output for all samples, None without the last stage."""
        window = self._forward_only(replace(batch, targets=None), with_loss=False)
        outputs = [window.outputs[microbatch] for microbatch in sorted(window.outputs)]
        return join_microbatches(outputs) if outputs else None

    def _forward_only(self, batch: StepBatch, *, with_loss: bool) -> Window:
        self.settle()
        with evaluating(self.stages.values()):
            self.timeline.begin(self._runner.step)  # these times belong to no training step
            window = self._runner.open(batch, training=False)
            self._runner.run(self._stream.forward_only(), training=False)
            if with_loss:
                window.learn(self._headers.totals(window))
            self._rank.windows.clear()
            self._empty()
        return window

    def rehearse(
        self,
        batch: StepBatch,
        windows: int,
        again: Callable[[Timeline], int] = lambda measured: 0,
        any_rank: Callable[[bool], bool] = bool,
    ) -> Timeline:
        """Run training windows without their update, to measure; nothing changes, see :meth:`unchanged`.

        Args:
            batch: this rank's part of the batch of every window.
            windows: how many to run.
            again: how many to run after them, by their times; the same number on all ranks.
            any_rank: whether something holds on any rank: all run one window more if one of them copies tensors in it.

        Returns:
            the times of the windows that ran last, which are not in the engine's own timeline.
        """
        with self.unchanged() as kept:
            if any_rank(kept.copies_late):
                with kept.first_run():
                    self._rehearsed(batch, 1)
            measured = self._rehearsed(batch, windows)
            more = again(measured)
            return self._rehearsed(batch, more) if more else measured

    @contextmanager
    def unchanged(self) -> Iterator[KeptState]:
        """Put back what the user's modules, loss and metrics were when the context ends, and tell what cannot be."""
        layers = [
            (name or f"layer {stage.first_layer + number}", layer)
            for stage in self.stages.values()
            for number, (name, layer) in enumerate(zip(stage.layer_names, stage.layers, strict=True))
        ]
        moved = self.swap is not None or self._sharding is not None or bool(self.stores)
        metrics = [(f"metrics.{metric.name}", metric.function) for metric in self.options.metrics]
        kept = KeptState([*layers, ("loss", self._loss), *metrics], moved=moved)
        try:
            yield kept
        finally:
            lost = kept.put_back()
            if lost:
                logger.warning(
                    "the runs before the first step have changed what cannot be put back: %s", ", ".join(lost)
                )

    def _rehearsed(self, batch: StepBatch, windows: int) -> Timeline:
        own, self._rank.timeline = self.timeline, Timeline(self.timeline.clock)
        actions = self._stream.without_update()
        for _ in range(windows):
            self.timeline.begin(-1)
            window = self._runner.open(batch, training=True, place=0)
            self._runner.run(actions)
            self._headers.totals(window)
            self._rank.windows.clear()
            self.timeline.finish()
        self._empty()
        self._ends.close()
        for store in self.stores.values():
            store.forget()
        self._executor.bytes_sent = dict.fromkeys(self._executor.bytes_sent, 0)
        self._host.count_anew()
        if self._rank.tensor_group is not None:
            self._rank.tensor_group.sent = SentBytes()
        measured, self._rank.timeline = self.timeline, own
        return measured

    def drain(self) -> list[FinishedStep]:
        """Finish the steps that have begun; afterwards the engine holds no activation and no message.

        Returns:
            the steps that have ended by this on this rank.
        """
        self._empty()
        return self._ends.take_finished()

    def give_up(self) -> bool:
        """Drop a step that has failed, so that the state before it can be read.

        Returns:
            whether that state is whole. It is not where windows overlap or the last step may still be undone, because
            weights of several steps are in use; where another object keeps the gradients; and where the step's
            forwards have changed buffers, e.g. running statistics.
        """
        if self._stream.overlap or self._ends.is_pending or self._sharding is not None:
            return False
        if states_of_buffers(self.stages) != self._states_of_buffers:
            return False
        self._rank.windows.clear()
        self._executor.abandon(())
        self._host.abandon()
        self._ends.close()
        return True

    def _empty(self) -> None:
        """Like :meth:`drain`, but the next call of it or of :meth:`submit` returns the steps."""
        self.settle()
        self._executor.drain()
        self._headers.drain()
        self._host.require_empty()

    def _take_asks(self) -> int:
        """What this rank asks of all: a stop until it has come, a save once."""
        asks = STOP * self._stop_requested + SAVE * self._save_requested
        self._save_requested = False
        return asks

    # Between two windows

    def settle(self) -> None:
        """Wait until no step is running and the last one can no longer be undone; call it before reading weights.

        Afterwards a filler has used what it keeps of micro-batches, and its results are in the optimizer's states.
        """
        if self._stream.overlap and self._runner.step > self._runner.since:
            self._runner.run(self._stream.drain(self._runner.step - self._runner.since, self._runner.since))
            self._runner.close_ended()
            self._runner.since = self._runner.step
        self._runner.settle()
        for stage, exchange in self.waves.items():
            exchange.close()
            if (store := self.stores.get(stage)) is not None:  # each worker has older weights of its own
                store.start_at(store.newest)
        if self._filler is not None:
            self._filler.settle()

    def _begin_next(self, window: Window, actions: Sequence[Action]) -> int:
        """Run the beginning of a window that does not need the last step's result, then settle; return its length."""
        assert self._beginning is not None  # only flushed schedules have post-validation
        length = self._beginning.lengths[self.view.position]
        own_buffers = copy_buffers(self.stages)
        self._runner.run(actions[:length])

        def drop() -> None:
            self._executor.abandon(self._beginning.in_flight[self.view.position] if self._beginning else ())

        if self._runner.settle(drop):
            own_buffers.put_back()
            window.begin_again(self.update.scale.of_sum)
            self._runner.run(actions[:length])
        self._ends.send_loss(window)
        return length
