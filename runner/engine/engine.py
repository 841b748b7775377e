"""One rank of a pipeline: batches in, finished optimizer steps out.

The engine is a stream: :meth:`Engine.submit` takes one step's batch and returns the steps that it finished (for
flushed schedules, that one), :meth:`Engine.drain` finishes what is under way. Ranks are not synchronised between
steps: the first stage may work on the next step while the others finish this one.

A step's loss and gradients are sums over micro-batches and replicas, divided once by the summed weight, at STEP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.engine.executor import Executor, RankView
from runner.engine.failure import explain_failure
from runner.engine.gradients import StageGradients
from runner.engine.loss_scale import LossScaling
from runner.engine.nonfinite import Finding, Watcher, first_over, replayed
from runner.engine.ties import TiedWeight, group_by_holders
from runner.engine.timeline import Timeline
from runner.engine.transport import Channel, Handle, Transport
from runner.engine.update import Update
from runner.engine.window import StepBatch, Window, join_microbatches, split_microbatches
from runner.errors import RunFailedError
from runner.model.boundary import flatten, num_samples
from runner.model.data import LossFunction
from runner.model.layers import StageModule
from runner.plan.batches import split_sizes
from runner.schedule.values import Action, Op, Program

__all__ = ["Engine", "EngineOptions", "FinishedStep"]


@dataclass(frozen=True)
class EngineOptions:
    """What a run fixes for its engine.

    Args:
        microbatches: per optimizer step and replica.
        dtype: of weights and, without ``autocast``, activations.
        seed: of random layers.
        clip_norm: largest global gradient norm, or None.
        clip_value: largest element of a gradient, or None.
        autocast: format of the forwards' matrix products, or None.
        scaling: of the loss, or None.
        skip_nonfinite: a step whose loss or gradients are not finite is skipped, on every rank, instead of ending the
            run. With ``scaling``, overflows are skipped anyway until the scale is at its minimum.
        compile: the layers are compiled.
    """

    microbatches: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    clip_norm: float | None = None
    clip_value: float | None = None
    autocast: torch.dtype | None = None
    scaling: LossScaling | None = None
    skip_nonfinite: bool = False
    compile: bool = False


@dataclass(frozen=True)
class FinishedStep:
    """One optimizer step's result, the same on every rank.

    Args:
        loss: mean over the step's samples (Σ sum / Σ weight).
        grad_norm: global norm before clipping; None where nothing clips.
        stop: some rank asked to stop after this step; all ranks learn it with the same step.
        skipped: the loss or a gradient was not finite, and the weights are those of the step before.
        loss_scale: that this step's loss was scaled with; None where losses are not scaled.
    """

    step: int
    loss: float
    grad_norm: float | None
    stop: bool = False
    skipped: bool = False
    loss_scale: float | None = None


class Engine:
    """See the module's text.

    Args:
        view: where this rank stands.
        training, forward_only: the lowered programs of a training and of a validation window.
        stages: this rank's stage modules by stage.
        loss: the loss function.
        transport: how messages travel.
        options: what the run fixes.
        tied: this rank's copies of weights that several stages hold.
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
    ) -> None:
        self.view = view
        self.stages = dict(stages)
        self.options = options
        self.transport = transport
        shared = {id(weight.parameter) for weight in tied}
        self.gradients = {stage: StageGradients(_named_parameters(module, shared)) for stage, module in stages.items()}
        self._tied = group_by_holders(tied)
        self.gradients |= {-1 - number: gradients for number, gradients in enumerate(self._tied)}  # of no stage alone
        self._programs = {True: training, False: forward_only}
        self.update = Update(
            gradients=self.gradients,
            pipeline=view.pipeline,
            transport=transport,
            clip_norm=options.clip_norm,
            clip_value=options.clip_value,
            scaling=options.scaling,
        )
        self._signatures: dict[tuple[object, ...], int] = {}
        self._step = 0
        self._stop_requested = False
        self._finished: list[FinishedStep] = []
        self._passing: dict[Channel, tuple[Handle, Tensor]] = {}
        self._executor = Executor(
            view=view,
            stages=self.stages,
            gradients=self.gradients,
            loss=loss,
            transport=transport,
            dtype=options.dtype,
            autocast=options.autocast,
            seed=options.seed,
            on_step=self._finish_step,
        )
        placement = training.schedule.placement[0]
        self._down = _chain(placement[0], len(view.pipeline), +1)
        self._up = _chain(placement[-1], len(view.pipeline), -1)

    @property
    def timeline(self) -> Timeline:
        return self._executor.timeline

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes of activations and of their gradients that this rank sent in training steps so far."""
        return {payload.name.lower(): count for payload, count in self._executor.bytes_sent.items()}

    def attach_optimizer(
        self,
        apply_update: Callable[[], None],
        master_of: Callable[[Tensor], torch.nn.Parameter] | None = None,
    ) -> None:
        """Set what updates the weights from ``parameter.grad``.

        Args:
            master_of: the fp32 master of a weight, whose ``grad`` is set in place of the weight's; None: no masters.
        """
        self.update.attach(apply_update, master_of)

    def start_at(self, step: int) -> None:
        """Set the index of the next step, after a resume."""
        self._step = step

    def request_stop(self) -> None:
        """Ask all ranks to stop at the end of the next step that begins here; safe in a signal handler."""
        self._stop_requested = True

    def submit(self, batch: StepBatch) -> list[FinishedStep]:
        """Run one training window.

        Raises:
            RunFailedError: an action failed (with the schedule's picture), or the loss is not finite.
        """
        self.timeline.begin(self._step, time.perf_counter())
        window = self._open(batch, training=True)
        self._run(window, self._programs[True].actions[self.view.position])
        self.timeline.finish(time.perf_counter())
        self._step += 1
        finished, self._finished = self._finished, []
        return finished

    def evaluate(self, batch: StepBatch) -> tuple[float, float]:
        """Run one forward-only window; this pipeline's ``(sum, weight)`` of the loss, on each of its ranks."""
        for module in self.stages.values():
            module.eval()
        self.timeline.begin(self._step, time.perf_counter())  # so that no training step gets these times
        window = self._open(batch, training=False)
        self._run(window, self._programs[False].actions[self.view.position])
        self._pass_totals(window.loss)
        self.drain()
        for module in self.stages.values():
            module.train()
        return float(window.loss[0]), float(window.loss[1])

    def predict(self, batch: StepBatch) -> Any:
        """Run one forward-only window without loss; the last layer's output for all samples, None on other ranks."""
        for module in self.stages.values():
            module.eval()
        self.timeline.begin(self._step, time.perf_counter())  # so that no training step gets these times
        window = self._open(replace(batch, targets=None), training=False)
        self._run(window, self._programs[False].actions[self.view.position])
        self.drain()
        for module in self.stages.values():
            module.train()
        outputs = [window.outputs[microbatch] for microbatch in sorted(window.outputs)]
        return join_microbatches(outputs) if outputs else None

    def rehearse(self, batch: StepBatch, windows: int) -> Timeline:
        """Run training windows without their update, to measure; weights, buffers and gradients stay as they were.

        Returns:
            the times of these windows, which the engine's own timeline does not keep.
        """
        kept = {name: value.clone() for module in self.stages.values() for name, value in _named_buffers(module)}
        own, self._executor.timeline = self._executor.timeline, Timeline()
        actions = [a for a in self._programs[True].actions[self.view.position] if a.op not in (Op.REDUCE, Op.STEP)]
        for _ in range(windows):
            self.timeline.begin(-1, time.perf_counter())
            self._run(self._open(batch, training=True), actions)
            self.timeline.finish(time.perf_counter())
        self.drain()
        for gradients in self.gradients.values():
            gradients.zero()
        for module in self.stages.values():
            for name, value in _named_buffers(module):
                value.copy_(kept[name])
        self._executor.bytes_sent = dict.fromkeys(self._executor.bytes_sent, 0)
        measured, self._executor.timeline = self._executor.timeline, own
        return measured

    def drain(self) -> None:
        """Finish what is under way; afterwards the engine holds no activation and no message."""
        self._executor.drain()
        for handle, _ in self._passing.values():
            handle.wait()
        self._passing.clear()

    # One window

    def _run(self, window: Window, actions: Sequence[Action]) -> None:
        def failed(index: int, action: Action, error: Exception) -> Exception:
            program = self._programs[window.training]
            shapes = self._executor.describe(action)
            return explain_failure(error, program, self.view, index, actions, shapes, self.stages)

        for gradients in self.gradients.values():
            gradients.claim()
        with self.transport.exclusive():
            random_state = torch.get_rng_state()
        self._executor.run(window, actions, failed)
        with self.transport.exclusive():  # ranks in threads share the generator: not between another's seed and its use
            torch.set_rng_state(random_state)

    def _open(self, batch: StepBatch, training: bool) -> Window:
        """Learn the step's sizes, from the batch or from the rank upstream, and pass them on."""
        samples, signature, stop = self._header(batch, training)
        if batch.samples is not None and batch.samples != samples:
            raise RunFailedError(
                f"step {self._step}: this rank loaded {batch.samples} samples where the first stage loaded {samples}; "
                "the dataset must give the same samples on every rank"
            )
        count = self.options.microbatches
        loss = torch.tensor([0.0, 0.0, float(stop)], dtype=torch.float64)
        has_targets = self._is_last and batch.targets is not None
        return Window(
            step=self._step,
            training=training,
            sizes=split_sizes(samples, count),
            signature=signature,
            inputs=split_microbatches(batch.inputs, samples, count) if 0 in self.stages else None,
            targets=split_microbatches(batch.targets, samples, count) if has_targets else None,
            loss=loss,
            loss_scale=self.update.scale.of_sum,
        )

    @property
    def _is_last(self) -> bool:
        return self.view.num_stages - 1 in self.stages

    def _header(self, batch: StepBatch, training: bool) -> tuple[int, int, int]:
        """Samples of the window, the signature of its input, and how many ranks want to stop: down the pipeline."""
        previous, following = self._neighbours(self._down)
        header = torch.zeros(6, dtype=torch.int64, device=self.transport.device)
        if previous is None:
            samples = batch.samples if batch.samples is not None else num_samples(batch.inputs)
            checksum = -1 if batch.checksum is None else batch.checksum
            values = [samples, self._signature(batch), int(training), self._step, 0, checksum]
            header = torch.tensor(values, device=header.device)
        else:
            start = time.perf_counter()
            self.transport.receive(header, previous, Channel.HEADER).wait()
            self.timeline.current.waiting += time.perf_counter() - start
        header[4] += int(self._stop_requested)
        values = [int(value) for value in header.tolist()]
        if values[2:4] != [int(training), self._step]:
            raise RunFailedError(
                f"rank {self.transport.rank} is at step {self._step} (training: {training}) where the rank before it "
                f"is at step {values[3]} (training: {bool(values[2])}): the ranks' loops differ"
            )
        if batch.checksum is not None and batch.checksum != values[5]:
            raise RunFailedError(
                f"step {self._step}: rank {self.transport.rank} loaded other samples than the first stage: all ranks "
                "of a pipeline must go through the data in one order"
            )
        if following is not None:
            self._pass_on(header, following, Channel.HEADER)
        return values[0], values[1], values[4]

    def _signature(self, batch: StepBatch) -> int:
        tensors, structure = flatten(batch.inputs)
        shapes = tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)
        return self._signatures.setdefault((str(structure), *shapes), len(self._signatures))

    def _neighbours(self, chain: Sequence[int]) -> tuple[int | None, int | None]:
        """Global ranks before and after this one in a chain of positions."""
        at = chain.index(self.view.position)
        before = self.view.pipeline[chain[at - 1]] if at else None
        after = self.view.pipeline[chain[at + 1]] if at + 1 < len(chain) else None
        return before, after

    def _pass_totals(self, totals: Tensor) -> None:
        """Fill in ``[sum, weight, stop]``, known on the last stage, on every rank of the pipeline."""
        previous, following = self._neighbours(self._up)
        if previous is not None:
            received = torch.empty_like(totals, device=self.transport.device)
            self.transport.receive(received, previous, Channel.TOTALS).wait()
            totals.copy_(received)
        if following is not None:
            self._pass_on(totals.to(self.transport.device), following, Channel.TOTALS)

    def _pass_on(self, message: Tensor, peer: int, channel: Channel) -> None:
        """Send without waiting for the peer, which may be a step behind; the message before has arrived by now."""
        before = self._passing.pop(channel, None)
        if before is not None:
            before[0].wait()
        self._passing[channel] = self.transport.send(message, peer, channel), message

    # STEP

    def _finish_step(self, window: Window) -> None:
        """Wait for the reductions, scale once, clip, update, and clear the gradients."""
        start = time.perf_counter()
        if self._is_last and len(self.view.replicas) > 1:
            totals = window.loss.to(self.transport.device)
            self.transport.all_reduce(totals, self.view.replicas).wait()
            window.loss.copy_(totals)
        self._pass_totals(window.loss)
        for handle in (*self._executor.reductions, *(each for g in self._tied for each in g.start(self.transport))):
            handle.wait()
        self._executor.reductions.clear()
        total, weight, stop = window.loss.tolist()
        if weight <= 0:
            what = "no sample has a weight" if weight == 0 else f"the samples' weights add up to {weight}"
            raise RunFailedError(f"step {window.step}: {what}; the weights are those of the step before")
        scale = self.update.scale.value if self.update.scale.is_dynamic else None
        finite = math.isfinite(total) and math.isfinite(weight) and self.update.agree_finite()
        agreed = time.perf_counter()
        norm = self._update_or_skip(window, total / weight, finite)
        end = time.perf_counter()
        self.timeline.current.waited_at_step += agreed - start
        self.timeline.current.optimizer += end - agreed
        self._finished.append(FinishedStep(window.step, total / weight, norm, stop > 0, not finite, scale))

    def _update_or_skip(self, window: Window, loss: float, finite: bool) -> float | None:
        """The gradients' norm where one is known.

        Raises:
            RunFailedError: the step is neither finite nor to be skipped.
        """
        scale = self.update.scale
        if finite:
            norm = self.update.apply(float(window.loss[1]))
            scale.succeeded()
            return norm
        self.update.clear()
        if scale.overflowed() or self.options.skip_nonfinite:
            return None
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the loss is {loss}, but a gradient is not finite"
        found = self._find_nonfinite(window)
        where = f"first not finite: {found.what}" if found else "every layer was finite when the step ran again"
        raise RunFailedError(f"step {window.step}: {what}; {where}; the weights are those of the step before")

    def _find_nonfinite(self, window: Window) -> Finding | None:
        """Play the window again, looking at every layer; the first finding of all ranks, on each of them."""

        def number() -> int:
            action = self._executor.current
            return self.view.first_microbatch + (action.microbatch or 0 if action is not None else 0)

        watcher = Watcher(self.stages, self.gradients, number)
        actions = [a for a in self._programs[True].actions[self.view.position] if a.op not in (Op.REDUCE, Op.STEP)]
        eager = torch.compiler.set_stance("force_eager") if self.options.compile else nullcontext()
        with watcher.watching(), self._executor.with_loss(watcher.check_loss), eager:
            self._run(replayed(window), actions)
        watcher.check_sums()
        self.update.clear()
        return first_over(watcher.found, self.transport, (self.view.pipeline, self.view.replicas))


def _chain(start: int, length: int, direction: int) -> list[int]:
    """Positions from ``start`` around the pipeline: the way of headers and totals."""
    return [(start + direction * offset) % length for offset in range(length)]


def _named_parameters(module: StageModule, left_out: set[int]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(module.global_name(n), p) for n, p in module.named_parameters() if id(p) not in left_out]


def _named_buffers(module: StageModule) -> list[tuple[str, Tensor]]:
    return [(module.global_name(name), value) for name, value in module.named_buffers()]
