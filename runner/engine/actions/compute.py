"""The compute actions of one rank: F, R, B, I and W of its stages, and K-FAC's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from runner.engine.actions.messages import Incoming
from runner.engine.actions.saved_tensors import Stash
from runner.engine.context import RankContext, number_of
from runner.engine.window import Window
from runner.memory.apply.recompute import ChangedBuffers
from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.data import LossFunction, loss_sum
from runner.model.layers import mix_seed
from runner.model.precision import to_precision
from runner.model.split.backward import backward_input, backward_weight
from runner.schedule.values import Action, Op

__all__ = ["Compute"]


_AS_IT_IS = nullcontext()

_Backward = Callable[[list[Tensor], list[Tensor], "list[Tensor] | None"], "Sequence[Tensor | None]"]
"""Leaves of the input, roots of the output and their gradients -> the gradients of the leaves."""


class Compute:
    """Forwards and backwards; each takes its buffers and leaves others.

    Args:
        rank: what the parts of the executor share.
        loss: the loss function, used by the last stage.
        dtype: of the model's input.
        autocast: format of the forwards' matrix products; None where it is the weights' own.
        seed: what random layers are seeded from, with step, micro-batch and layer.
        on_losses: called when a window's last loss is known, on the last stage's rank.
    """

    def __init__(
        self,
        rank: RankContext,
        *,
        loss: LossFunction,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        seed: int,
        on_losses: Callable[[Window], None],
    ) -> None:
        self._rank = rank
        self._loss = loss
        self._dtype = dtype
        self._autocast = autocast
        self._seed = seed
        self._on_losses = on_losses
        self._changed = {stage: ChangedBuffers([module]) for stage, module in rank.stages.items()}
        self.recomputed: Set[tuple[int, int | None]] = frozenset()  # stages and micro-batches whose graph R makes
        self.moved: Set[tuple[int, int | None]] = frozenset()  # those whose graph leaves the rank for a while

    @contextmanager
    def with_loss(self, wrap: Callable[[LossFunction], LossFunction]) -> Iterator[None]:
        """Use a wrapped loss function for a while."""
        own, self._loss = self._loss, wrap(self._loss)
        try:
            yield
        finally:
            self._loss = own

    def forward(self, window: Window, action: Action) -> None:
        """``output = stage(input)``; on the last stage also the loss. Keeps the graph for the backward, or for R."""
        stage, microbatch = action.stage, number_of(action)
        if not window.sizes[microbatch]:
            return
        value = self._input(window, stage, microbatch)
        again = window.training and (stage, microbatch) in self.recomputed
        buffers = self._changed[stage].snapshot() if again else None
        elsewhere = self._rank.recomputes_elsewhere(window, stage)
        hooks: AbstractContextManager[object] = _AS_IT_IS
        if again or elsewhere:
            hooks = saved_tensors_hooks(_drop, _never)
        elif (stage, microbatch) in self.moved:
            stash = self._stash(stage, microbatch, value)
            hooks = saved_tensors_hooks(stash.pack, stash.unpack)
        start = time.perf_counter()
        with self._rank.transport.exclusive():
            try:
                with hooks, self._seen(window, stage, microbatch):
                    output = self._run(window, stage, microbatch, value, counts=True)
            except Exception:
                self._rank.buffers.put("input", stage, microbatch, value)  # for the message: what the stage was given
                raise
        self._rank.timeline.compute("F", stage, microbatch, start, time.perf_counter())
        if stage == self._rank.view.num_stages - 1 and window.targets is not None:
            window.losses_to_come -= 1
            if not window.losses_to_come:
                self._on_losses(window)
        if buffers is not None:
            buffers.forget_unchanged()
            self._rank.buffers.put("buffers", stage, microbatch, buffers)
        if again or elsewhere:
            output = map_tensors(_as_leaf, output)
        keeps_graph = window.training and not elsewhere
        if keeps_graph:
            self._rank.buffers.put("graph", stage, microbatch, (value, output))
        self._hand_forward(window, stage + 1, microbatch, output, to_send=not keeps_graph)

    def _hand_forward(self, window: Window, stage: int, microbatch: int, value: Any, *, to_send: bool) -> None:
        """Keep an output for the next stage: for its F, and for its R where another rank runs that.

        Args:
            stage: that next one.
            value: the output.
            to_send: no graph keeps the output, from which it would be sent.
        """
        if stage == self._rank.view.num_stages:
            return
        users = [(Op.F, "output")]
        if self._rank.recomputes_elsewhere(window, stage):
            users.append((Op.R, "copy"))
        for op, kind in users:
            if self._rank.holds(window, stage, microbatch, op):
                self._rank.buffers.put("input", stage, microbatch, map_tensors(_as_leaf, value))
            elif to_send:
                self._rank.buffers.put(kind, stage - 1, microbatch, value)

    def _seen(self, window: Window, stage: int, microbatch: int) -> AbstractContextManager[object]:
        """K-FAC keeps what it needs of a training step's forward and of the backward after it."""
        curvature = self._rank.curvature
        return _AS_IT_IS if curvature is None or not window.training else curvature.seeing(stage, microbatch)

    def curvature(self, window: Window, action: Action) -> None:
        """A sum or an inversion of K-FAC's."""
        assert self._rank.curvature is not None  # a schedule with such work has an optimizer for it
        with self._rank.transport.exclusive():
            self._rank.curvature.do(action, self._rank.timeline)

    def _stash(self, stage: int, microbatch: int, value: Any) -> Stash:
        """Keeps what autograd saves of a forward; weights and the step's batch stay where they are."""
        module = self._rank.stages[stage]
        batch = flatten(value)[0] if stage == 0 else []
        stash = Stash([*module.parameters(), *module.buffers(), *batch])
        self._rank.buffers.put("stash", stage, microbatch, stash)
        return stash

    def recompute(self, window: Window, action: Action) -> None:
        """The forward again, with the same random numbers and buffers, for the graph that F did not keep."""
        stage, microbatch = action.stage, number_of(action)
        if not window.sizes[microbatch]:
            return
        if self._rank.recomputes_elsewhere(window, stage):
            value, as_before = self._input(window, stage, microbatch), _AS_IT_IS
        else:
            value, _ = self._rank.buffers.take("graph", stage, microbatch)
            as_before = self._rank.buffers.take("buffers", stage, microbatch).restored()
        start = time.perf_counter()
        with self._rank.transport.exclusive(), as_before:
            output = self._run(window, stage, microbatch, value, counts=False)
        self._rank.timeline.compute("R", stage, microbatch, start, time.perf_counter())
        self._rank.buffers.put("graph", stage, microbatch, (value, output))

    def _run(self, window: Window, stage: int, microbatch: int, value: Any, *, counts: bool) -> Any:
        """A stage's output for its input; of the last stage its loss, which the window's may count."""
        module, sharding = self._rank.stages[stage], self._rank.sharding
        run = module if sharding is None else sharding.forward
        seed = self._seed_layers(window, microbatch) if window.training else None
        with self._autocasting(), _in_evaluation(module) if microbatch in window.stand_ins else _AS_IT_IS:
            output = run(enter_graph(value), seed)
        if stage == self._rank.view.num_stages - 1:
            output = self._lose(window, microbatch, output, counts=counts)
        return output

    def _autocasting(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return _AS_IT_IS
        return torch.autocast(self._rank.transport.device.type, self._autocast)

    def _input(self, window: Window, stage: int, microbatch: int) -> Any:
        if stage == 0:
            assert window.inputs is not None
            value = window.inputs[microbatch]
            if self._rank.stages[0].takes_targets:
                assert window.targets is not None
                value = (value, window.targets[microbatch])
            return to_precision(value, self._dtype)
        incoming = self._rank.buffers.take("input", stage, microbatch)
        if not isinstance(incoming, Incoming):
            return incoming
        incoming.wait(self._rank.timeline)
        assert incoming.spec is not None
        return incoming.spec.rebuild(incoming.tensors)

    def _lose(self, window: Window, microbatch: int, output: Any, *, counts: bool = True) -> Any:
        """The micro-batch's loss as a sum, scaled; adds it to the window's. Without targets the output is kept."""
        if window.targets is None:
            if microbatch not in window.stand_ins:
                window.outputs[microbatch] = output
            return output
        output = to_precision(output, torch.float32)
        total, weight = loss_sum(self._loss(output, window.targets[microbatch]), window.sizes[microbatch])
        if counts and microbatch not in window.stand_ins:
            window.loss[0] += total.detach().double().cpu()
            window.loss[1] += weight.double().cpu() if isinstance(weight, Tensor) else weight
        if microbatch in window.stand_ins:
            return total * 0.0
        return total if window.loss_scale == 1.0 else total * window.loss_scale

    def backward(self, window: Window, action: Action) -> None:
        """Gradients of the stage's weights, accumulated, and of its input, kept to be sent."""

        def run(leaves: list[Tensor], roots: list[Tensor], gradients: list[Tensor] | None) -> list[Tensor | None]:
            if self._rank.sharding is not None:
                self._rank.sharding.backward(roots, gradients)
            elif roots:
                torch.autograd.backward(roots, gradients)
            return [leaf.grad for leaf in leaves]

        self._backward("B", window, action, run)

    def backward_input(self, window: Window, action: Action) -> None:
        """Gradients of the stage's input, kept to be sent; those of most weights are left to W."""

        def run(leaves: list[Tensor], roots: list[Tensor], gradients: list[Tensor] | None) -> Sequence[Tensor | None]:
            produced, pending = backward_input(roots, gradients, leaves)
            self._rank.buffers.put("weight_gradients", action.stage, number_of(action), pending)
            return produced

        self._backward("I", window, action, run)

    def _backward(self, op: str, window: Window, action: Action, run: _Backward) -> None:
        """Take a forward's graph and its output's gradients, and hand its input's on."""
        stage, microbatch = action.stage, number_of(action)
        if not window.sizes[microbatch]:
            return
        leaves, roots = self._take_graph(stage, microbatch)
        gradients = self._output_gradients(window, stage, microbatch)
        start = time.perf_counter()
        with self._rank.transport.exclusive():
            produced = run(leaves, roots, gradients)
        self._rank.timeline.compute(op, stage, microbatch, start, time.perf_counter())
        self._hand_on(window, stage, microbatch, leaves, produced)

    def backward_weight(self, window: Window, action: Action) -> None:
        """What I left: the gradients of the stage's weights, accumulated."""
        stage, microbatch = action.stage, number_of(action)
        if not window.sizes[microbatch]:
            return
        pending = self._rank.buffers.take("weight_gradients", stage, microbatch)
        start = time.perf_counter()
        with self._rank.transport.exclusive():
            backward_weight(pending)
        self._rank.timeline.compute("W", stage, microbatch, start, time.perf_counter())

    def _take_graph(self, stage: int, microbatch: int) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves of a stage's input and the roots of its output: what requires gradients of both."""
        value, output = self._rank.buffers.take("graph", stage, microbatch)
        if (stage, microbatch) in self.moved:
            incoming: Incoming = self._rank.buffers.take("returned", stage, microbatch)
            incoming.wait(self._rank.timeline)
            self._rank.buffers.take("stash", stage, microbatch).come_back(incoming.tensors)
        leaves = [tensor for tensor in flatten(value)[0] if tensor.requires_grad] if stage > 0 else []
        return leaves, [tensor for tensor in flatten(output)[0] if tensor.requires_grad]

    def _output_gradients(self, window: Window, stage: int, microbatch: int) -> list[Tensor] | None:
        """The gradients of a stage's output, from the stage after; None on the last one, whose output is the loss."""
        if stage == self._rank.view.num_stages - 1:
            return None
        sent_by_forward = not self._rank.recomputes_elsewhere(window, stage)
        if sent_by_forward and not self._rank.holds(window, stage + 1, microbatch):
            self._rank.buffers.take("sent", stage, microbatch).wait()
        incoming = self._rank.buffers.take("gradient", stage, microbatch)
        if isinstance(incoming, Incoming):
            incoming.wait(self._rank.timeline)
            return incoming.tensors
        received: list[Tensor] = incoming
        return received

    def _hand_on(
        self, window: Window, stage: int, microbatch: int, value: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        """Keep the gradients of a stage's input for the stage before; zeros where there is none."""
        if stage == 0:
            return
        made = [torch.zeros_like(t) if g is None else g for t, g in zip(value, gradients, strict=True)]
        kind = "gradient" if self._rank.holds(window, stage - 1, microbatch, Op.B) else "input_gradient"
        self._rank.buffers.put(kind, stage - 1 if kind == "gradient" else stage, microbatch, made)

    def _seed_layers(self, window: Window, microbatch: int) -> Callable[[int], None]:
        """Random layers depend on (step, micro-batch over all replicas, layer), so that layouts agree."""
        number = self._rank.view.first_microbatch + microbatch

        def seed(layer: int) -> None:
            _seed_generator(mix_seed(self._seed, window.step, number, layer), self._rank.transport.device)

        return seed


@contextmanager
def _in_evaluation(module: torch.nn.Module) -> Iterator[None]:
    """So passes a stand-in: running statistics stay as they are."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


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


def _drop(tensor: Tensor) -> None:
    """A forward whose graph R will make keeps nothing; otherwise it is the same forward."""


def _never(dropped: None) -> Tensor:
    raise RuntimeError("a forward that is recomputed has no backward of its own")
