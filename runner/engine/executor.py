"""Run one rank's list of actions: a table from op to handler, and the buffers that they own.

The executor knows no schedule by name. Messages that an action needs were posted by RECV actions that the lowering
placed; the handler of the action waits for them. A buffer is put once and taken once; what is left at the end of a
window is an error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.engine.buffers import Buffers
from runner.engine.gradients import StageGradients
from runner.engine.split_backward import backward_input, backward_weight
from runner.engine.timeline import Timeline
from runner.engine.transport import Channel, Handle, Transport
from runner.engine.window import BoundarySpec, Window
from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.data import LossFunction, loss_sum
from runner.model.layers import StageModule, mix_seed
from runner.model.profile import to_precision
from runner.schedule.values import COMPUTE, Action, Op, Payload

__all__ = ["Executor", "RankView"]

_CHANNELS = {Payload.ACTIVATION: Channel.ACTIVATION, Payload.GRADIENT: Channel.GRADIENT}


@dataclass(frozen=True)
class RankView:
    """Where a rank stands.

    Args:
        position: in its pipeline.
        pipeline: global rank at each position of this rank's pipeline.
        replicas: global ranks that hold the same stages, in replica order.
        num_stages: stages of the model.
        first_microbatch: global number of this replica's first micro-batch: d * T.
    """

    position: int
    pipeline: tuple[int, ...]
    replicas: tuple[int, ...]
    num_stages: int
    first_microbatch: int


@dataclass
class _Incoming:
    """Tensors that are being received."""

    handles: list[Handle]
    tensors: list[Tensor]
    spec: BoundarySpec | None = None


class Executor:
    """Runs compute, messages and reductions; the optimizer's part of STEP is handed to ``on_step``.

    Args:
        view: where this rank stands.
        stages: this rank's stage modules by stage.
        gradients: the gradients of each.
        loss: the loss function, used by the last stage.
        transport: how messages travel.
        dtype: of the model's input.
        autocast: format of the forwards' matrix products; None where it is the weights' own.
        seed: what random layers are seeded from, with step, micro-batch and layer.
        on_step: called once per window, when every stage of this rank came to its STEP.
    """

    def __init__(
        self,
        *,
        view: RankView,
        stages: Mapping[int, StageModule],
        gradients: Mapping[int, StageGradients],
        loss: LossFunction,
        transport: Transport,
        dtype: torch.dtype,
        autocast: torch.dtype | None = None,
        seed: int,
        on_step: Callable[[Window], None],
    ) -> None:
        self.view = view
        self.stages = stages
        self.gradients = gradients
        self.timeline = Timeline()
        self.reductions: list[Handle] = []
        self.bytes_sent = dict.fromkeys(Payload, 0)
        self._loss = loss
        self._transport = transport
        self._dtype = dtype
        self._autocast = autocast
        self.current: Action | None = None  # being executed
        self._seed = seed
        self._on_step = on_step
        self._buffers = Buffers()
        self._specs: dict[tuple[int, bool, int, int], BoundarySpec] = {}  # of each stage's input, by window key
        self._announced: dict[tuple[int, bool, int, int], BoundarySpec] = {}  # of each stage's output
        self._sends: deque[tuple[Handle, Tensor]] = deque()
        self._stepped: set[int] = set()
        self._posted: set[Action] = set()  # receives that were posted before their turn
        self._handlers: dict[Op, Callable[[Window, Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weight,
            Op.SEND: self._send,
            Op.RECV: self._receive,
            Op.REDUCE: self._reduce,
            Op.STEP: self._step,
        }

    def run(
        self, window: Window, actions: Sequence[Action], failed: Callable[[int, Action, Exception], Exception]
    ) -> None:
        """Execute ``actions`` in order.

        Args:
            failed: makes the error to raise when the action at an index fails.
        """
        for index, action in enumerate(actions):
            self.current = action
            try:
                if action.op in COMPUTE:
                    self._post_ahead(window, actions, index + 1)
                if action in self._posted:
                    self._posted.remove(action)
                else:
                    self._handlers[action.op](window, action)
            except Exception as error:
                raise failed(index, action, error) from error
        self._buffers.require_empty()

    def _post_ahead(self, window: Window, actions: Sequence[Action], start: int) -> None:
        """Post the receives that stand before the next compute, so that messages may arrive during this one.

        Only as far as the shapes are known, and in order, as each channel is a FIFO.
        """
        for index in range(start, len(actions)):
            action = actions[index]
            if action.op in COMPUTE or (action.op is Op.RECV and not self._is_known(window, action)):
                return
            if action.op is Op.RECV:
                self._receive(window, action)
                self._posted.add(action)

    def _is_known(self, window: Window, action: Action) -> bool:
        """Whether the shapes of what an action receives are known."""
        stage, microbatch = action.stage, _number(action)
        if not window.sizes[microbatch]:
            return True
        if action.payload is Payload.ACTIVATION:
            return (stage, *window.key(microbatch)) in self._specs
        return self._buffers.has("graph", stage, microbatch)

    def drain(self) -> None:
        """Wait for the messages still under way; afterwards nothing is alive."""
        while self._sends:
            self._sends.popleft()[0].wait()
        self._buffers.require_empty()

    def describe(self, action: Action) -> str:
        """The buffers that an action's stage and micro-batch own, with their shapes."""
        return self._buffers.describe(action.stage, action.microbatch)

    @contextmanager
    def with_loss(self, wrap: Callable[[LossFunction], LossFunction]) -> Iterator[None]:
        """Use a wrapped loss function for a while."""
        own, self._loss = self._loss, wrap(self._loss)
        try:
            yield
        finally:
            self._loss = own

    # Compute

    def _forward(self, window: Window, action: Action) -> None:
        """``output = stage(input)``; on the last stage also the loss. Keeps the graph for the backward."""
        stage, microbatch = action.stage, _number(action)
        if not window.sizes[microbatch]:
            return
        value = self._input(window, stage, microbatch)
        module = self.stages[stage]
        start = time.perf_counter()
        with self._transport.exclusive(), torch.set_grad_enabled(window.training):
            try:
                with torch.autocast(self._transport.device.type, self._autocast, enabled=self._autocast is not None):
                    output = module(
                        enter_graph(value), self._seed_layers(window, microbatch) if window.training else None
                    )
                if stage == self.view.num_stages - 1:
                    output = self._lose(window, microbatch, output)
            except Exception:
                self._buffers.put("input", stage, microbatch, value)  # for the message: what the stage was given
                raise
        self.timeline.compute("F", stage, microbatch, start, time.perf_counter())
        if stage + 1 in self.stages:
            self._buffers.put("input", stage + 1, microbatch, map_tensors(_as_leaf, output))
        if window.training:
            self._buffers.put("graph", stage, microbatch, (value, output))
        elif stage < self.view.num_stages - 1 and stage + 1 not in self.stages:
            self._buffers.put("output", stage, microbatch, output)

    def _input(self, window: Window, stage: int, microbatch: int) -> Any:
        if stage == 0:
            assert window.inputs is not None
            return to_precision(window.inputs[microbatch], self._dtype)
        incoming = self._buffers.take("input", stage, microbatch)
        if not isinstance(incoming, _Incoming):
            return incoming
        self._wait(incoming.handles)
        assert incoming.spec is not None
        return incoming.spec.rebuild(incoming.tensors)

    def _lose(self, window: Window, microbatch: int, output: Any) -> Any:
        """The micro-batch's loss as a sum, scaled; adds it to the window's. Without targets the output is kept."""
        if window.targets is None:
            window.outputs[microbatch] = output
            return output
        output = to_precision(output, torch.float32)
        total, weight = loss_sum(self._loss(output, window.targets[microbatch]), window.sizes[microbatch])
        window.loss[0] += total.detach().double().cpu()
        window.loss[1] += weight.double().cpu() if isinstance(weight, Tensor) else weight
        return total if window.loss_scale == 1.0 else total * window.loss_scale

    def _backward(self, window: Window, action: Action) -> None:
        """Gradients of the stage's weights, accumulated, and of its input, kept to be sent."""
        stage, microbatch = action.stage, _number(action)
        if not window.sizes[microbatch]:
            return
        value, roots = self._take_graph(stage, microbatch)
        gradients = self._output_gradients(stage, microbatch)
        start = time.perf_counter()
        with self._transport.exclusive():
            if roots:
                torch.autograd.backward(roots, gradients)
        self.timeline.compute("B", stage, microbatch, start, time.perf_counter())
        self._hand_on(stage, microbatch, value, [leaf.grad for leaf in value])

    def _backward_input(self, window: Window, action: Action) -> None:
        """Gradients of the stage's input, kept to be sent; those of most weights are left to W."""
        stage, microbatch = action.stage, _number(action)
        if not window.sizes[microbatch]:
            return
        value, roots = self._take_graph(stage, microbatch)
        gradients = self._output_gradients(stage, microbatch)
        start = time.perf_counter()
        with self._transport.exclusive():
            produced, pending = backward_input(roots, gradients, value)
        self.timeline.compute("I", stage, microbatch, start, time.perf_counter())
        self._buffers.put("weight_gradients", stage, microbatch, pending)
        self._hand_on(stage, microbatch, value, produced)

    def _backward_weight(self, window: Window, action: Action) -> None:
        """What I left: the gradients of the stage's weights, accumulated."""
        stage, microbatch = action.stage, _number(action)
        if not window.sizes[microbatch]:
            return
        pending = self._buffers.take("weight_gradients", stage, microbatch)
        start = time.perf_counter()
        with self._transport.exclusive():
            backward_weight(pending)
        self.timeline.compute("W", stage, microbatch, start, time.perf_counter())

    def _take_graph(self, stage: int, microbatch: int) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves of a stage's input and the roots of its output: what requires gradients of both."""
        value, output = self._buffers.take("graph", stage, microbatch)
        leaves = [tensor for tensor in flatten(value)[0] if tensor.requires_grad] if stage > 0 else []
        return leaves, [tensor for tensor in flatten(output)[0] if tensor.requires_grad]

    def _output_gradients(self, stage: int, microbatch: int) -> list[Tensor] | None:
        """The gradients of a stage's output, from the stage after; None on the last one, whose output is the loss."""
        if stage == self.view.num_stages - 1:
            return None
        if stage + 1 not in self.stages:
            for handle, _ in self._buffers.take("sent", stage, microbatch):
                handle.wait()
        incoming = self._buffers.take("gradient", stage, microbatch)
        if isinstance(incoming, _Incoming):
            self._wait(incoming.handles)
            return incoming.tensors
        received: list[Tensor] = incoming
        return received

    def _hand_on(self, stage: int, microbatch: int, value: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a stage's input for the stage before; zeros where there is none."""
        if stage == 0:
            return
        made = [torch.zeros_like(t) if g is None else g for t, g in zip(value, gradients, strict=True)]
        kind = "gradient" if stage - 1 in self.stages else "input_gradient"
        self._buffers.put(kind, stage - 1 if kind == "gradient" else stage, microbatch, made)

    def _seed_layers(self, window: Window, microbatch: int) -> Callable[[int], None]:
        """Random layers depend on (step, micro-batch over all replicas, layer), so that layouts agree."""
        number = self.view.first_microbatch + microbatch

        def seed(layer: int) -> None:
            _seed_generator(mix_seed(self._seed, window.step, number, layer), self._transport.device)

        return seed

    # Messages

    def _send(self, window: Window, action: Action) -> None:
        """Start sending a stage's output, or the gradient of its input."""
        stage, microbatch, payload = action.stage, _number(action), action.payload
        if not window.sizes[microbatch]:
            return
        peer = self._peer(action)
        if payload is Payload.ACTIVATION:
            value = (
                self._buffers.peek("graph", stage, microbatch)[1]
                if window.training
                else (self._buffers.take("output", stage, microbatch))
            )
            self._announce((stage, *window.key(microbatch)), value, peer)
            tensors = [tensor.detach() for tensor in flatten(value)[0]]
        else:
            tensors = self._buffers.take("input_gradient", stage, microbatch)
        assert payload is not None
        sent = []
        for tensor in tensors:
            message = tensor.contiguous()
            if window.training:
                self.bytes_sent[payload] += message.numel() * message.element_size()
            sent.append((self._transport.send(message, peer, _CHANNELS[payload]), message))
        self._keep_until_sent(window, action, sent)

    def _keep_until_sent(self, window: Window, action: Action, sent: list[tuple[Handle, Tensor]]) -> None:
        """Own messages until they have left, without waiting for a peer that is still computing.

        An activation has arrived when its gradient comes back: its backward lets it go. Of the other messages the last
        one may still be on its way; the ones before were due before it was made.
        """
        if action.payload is Payload.ACTIVATION and window.training:
            self._buffers.put("sent", action.stage, _number(action), sent)
            return
        while action.payload is Payload.GRADIENT and self._sends:
            self._sends.popleft()[0].wait()
        self._sends += sent

    def _announce(self, key: tuple[int, bool, int, int], value: Any, peer: int) -> None:
        """Tell the receiver a boundary's shapes the first time; later they must be the same.

        Raises:
            RuntimeError: the same input shapes gave another output shape.
        """
        spec = BoundarySpec.of(value)
        known = self._announced.get(key)
        if known is None:
            self._transport.send_bytes(spec.to_bytes(), peer, Channel.SPEC)
            self._announced[key] = spec
        elif known != spec:
            raise RuntimeError(
                f"stage {key[0]} gave {spec.tensors} where inputs of the same shape gave {known.tensors} before: "
                "shapes between stages may depend on the input's shape only"
            )

    def _receive(self, window: Window, action: Action) -> None:
        """Post the receive of a stage's input, or of the gradient of its output."""
        stage, microbatch, payload = action.stage, _number(action), action.payload
        if not window.sizes[microbatch]:
            return
        peer = self._peer(action)
        spec = None
        if payload is Payload.ACTIVATION:
            key = (stage, *window.key(microbatch))
            if key not in self._specs:
                self._specs[key] = BoundarySpec.from_bytes(self._transport.receive_bytes(peer, Channel.SPEC))
            spec = self._specs[key]
            tensors = spec.allocate(self._transport.device)
        else:
            output = self._buffers.peek("graph", stage, microbatch)[1]
            needed = [t for t in flatten(output)[0] if t.requires_grad]
            tensors = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in needed]
        assert payload is not None
        handles = [self._transport.receive(tensor.detach(), peer, _CHANNELS[payload]) for tensor in tensors]
        kind = "input" if payload is Payload.ACTIVATION else "gradient"
        self._buffers.put(kind, stage, microbatch, _Incoming(handles, tensors, spec))

    def _peer(self, action: Action) -> int:
        assert action.peer is not None
        return self.view.pipeline[action.peer]

    def _wait(self, handles: Sequence[Handle]) -> None:
        start = time.perf_counter()
        for handle in handles:
            handle.wait()
        self.timeline.current.waiting += time.perf_counter() - start

    # Weights

    def _reduce(self, window: Window, action: Action) -> None:
        """Start summing the stage's gradients over its replicas; STEP waits for it."""
        if len(self.view.replicas) > 1:
            self.reductions += self.gradients[action.stage].reduce(self._transport, self.view.replicas)

    def _step(self, window: Window, action: Action) -> None:
        """The optimizer steps for all stages of the rank together, at the last one's STEP."""
        self._stepped.add(action.stage)
        if len(self._stepped) == len(self.stages):
            self._stepped.clear()
            self._on_step(window)


def _number(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _as_leaf(tensor: Tensor) -> Tensor:
    """What the next stage of the same rank gets: no message, no graph across the border."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _seed_generator(seed: int, device: torch.device) -> None:
    """Seed the generators that a layer on ``device`` can draw from.

    ``torch.manual_seed`` would seed every accelerator's too, and record a stack trace for each that is not in use:
    up to milliseconds a call, before every layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
