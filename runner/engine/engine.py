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
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.engine.executor import Executor, RankView
from runner.engine.failure import explain_failure
from runner.engine.gradients import StageGradients
from runner.engine.ties import TiedWeight, group_by_holders
from runner.engine.timeline import Timeline
from runner.engine.transport import Channel, Handle, Transport
from runner.engine.window import StepBatch, Window, split_microbatches
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
        dtype: of weights and activations.
        seed: of random layers.
        clip_norm: largest global gradient norm, or None.
        compile: the layers are compiled.
    """

    microbatches: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    clip_norm: float | None = None
    compile: bool = False


@dataclass(frozen=True)
class FinishedStep:
    """One optimizer step's result, the same on every rank.

    Args:
        loss: mean over the step's samples (Σ sum / Σ weight).
        grad_norm: global norm before clipping; None where nothing clips.
        stop: some rank asked to stop after this step; all ranks learn it with the same step.
    """

    step: int
    loss: float
    grad_norm: float | None
    stop: bool = False


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
        self._apply_update: Callable[[], None] = _no_optimizer
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

    def attach_optimizer(self, apply_update: Callable[[], None]) -> None:
        """Set what updates the weights from ``parameter.grad``."""
        self._apply_update = apply_update

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
        return Window(
            step=self._step,
            training=training,
            sizes=split_sizes(samples, count),
            signature=signature,
            inputs=split_microbatches(batch.inputs, samples, count) if 0 in self.stages else None,
            targets=split_microbatches(batch.targets, samples, count) if self._is_last else None,
            loss=loss,
        )

    @property
    def _is_last(self) -> bool:
        return self.view.num_stages - 1 in self.stages

    def _header(self, batch: StepBatch, training: bool) -> tuple[int, int, int]:
        """Samples of the window, the signature of its input, and how many ranks want to stop: down the pipeline."""
        previous, following = self._neighbours(self._down)
        header = torch.zeros(5, dtype=torch.int64, device=self.transport.device)
        if previous is None:
            samples = batch.samples if batch.samples is not None else num_samples(batch.inputs)
            values = [samples, self._signature(batch), int(training), self._step, 0]
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
        scaled = time.perf_counter()
        total, weight, stop = window.loss.tolist()
        if not math.isfinite(total) or weight <= 0:
            what = f"the loss is {total / weight if weight else math.nan}" if weight else "no sample has a weight"
            raise RunFailedError(f"step {window.step}: {what}; the weights are those of the step before")
        for gradients in self.gradients.values():
            gradients.divide(weight)
        norm = self._clip()
        self._apply_update()
        for gradients in self.gradients.values():
            gradients.zero()
        end = time.perf_counter()
        self.timeline.current.waited_at_step += scaled - start
        self.timeline.current.optimizer += end - scaled
        self._finished.append(FinishedStep(window.step, total / weight, norm, stop > 0))

    def _clip(self) -> float | None:
        """Scale the gradients down to the largest global norm allowed; the norm before.

        The norm is the exact sum of per-parameter squares in float64, whatever the layout.
        """
        if self.options.clip_norm is None:
            return None
        squares = [square for stage in sorted(self.gradients) for square in self.gradients[stage].squares()]
        norm = math.sqrt(math.fsum(self._gather(squares)))
        factor = min(1.0, self.options.clip_norm / (norm + 1e-6))
        if factor < 1.0:
            for gradients in self.gradients.values():
                gradients.scale(factor)
        return norm

    def _gather(self, values: list[float]) -> list[float]:
        """The values of all ranks of the pipeline."""
        if len(self.view.pipeline) == 1:
            return values
        own = torch.tensor([len(values)], device=self.transport.device)
        length = max(int(count) for count in self.transport.all_gather(own, self.view.pipeline))
        padded = torch.zeros(length, dtype=torch.float64, device=self.transport.device)
        padded[: len(values)] = torch.tensor(values, dtype=torch.float64)
        return [value for part in self.transport.all_gather(padded, self.view.pipeline) for value in part.tolist()]


def _chain(start: int, length: int, direction: int) -> list[int]:
    """Positions from ``start`` around the pipeline: the way of headers and totals."""
    return [(start + direction * offset) % length for offset in range(length)]


def _named_parameters(module: StageModule, left_out: set[int]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(module.global_name(n), p) for n, p in module.named_parameters() if id(p) not in left_out]


def _named_buffers(module: StageModule) -> list[tuple[str, Tensor]]:
    return [(module.global_name(name), value) for name, value in module.named_buffers()]


def _no_optimizer() -> None:
    raise RuntimeError("the engine has no optimizer: call attach_optimizer first")
