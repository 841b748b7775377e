"""The compute actions of one rank: F, R, B, I and W of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from runner.engine.actions.messages import Incoming, alone
from runner.engine.context import RankContext, number_of
from runner.engine.window import Window
from runner.engine.work import NOTHING, Place, Works
from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.buffers import ChangedBuffers
from runner.model.data import LossFunction, checked_weight, loss_sum
from runner.model.figures import Figure, WithFigures
from runner.model.layers import StageModule, draws_from_torch_alone
from runner.model.metrics import Metric
from runner.model.modes import evaluating
from runner.model.precision import for_loss, to_precision
from runner.model.seeds import mix_seed, seed_generators, seed_torch
from runner.model.split.backward import backward_input, backward_weight, capturing
from runner.schedule.values import Action, Op

__all__ = ["Compute"]


_Backward = Callable[[list[Tensor], list[Tensor], "list[Tensor] | None"], "Sequence[Tensor | None]"]
"""Takes leaves of the input, roots of the output and their gradients; returns the gradients of the leaves."""


class Compute:
    """Runs forwards and backwards; each takes the buffers that it needs and puts those that it makes.

    Args:
        rank: what the parts of the executor share.
        works: the additions that wrap forwards and backwards.
        loss: the loss function, used by the last stage.
        dtype: dtype of the model's input.
        autocast: format of the forwards' matrix products; None if it is the format of the weights.
        seed: seed of random layers, combined with step, micro-batch and layer.
        on_losses: called on the last stage's rank when the last loss of a window is known.
        metrics: measured beside the loss in windows that are not of training.
        figures: what the loss function computes beside the loss in windows of training.
    """

    def __init__(
        self,
        rank: RankContext,
        works: Works,
        *,
        loss: LossFunction,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        seed: int,
        on_losses: Callable[[Window], None],
        metrics: Sequence[Metric] = (),
        figures: Sequence[Figure] = (),
    ) -> None:
        self.works = works
        self._rank = rank
        self._loss = loss
        self._dtype = dtype
        self._autocast = autocast
        self._seed = seed
        self._on_losses = on_losses
        self._metrics, self._figures = metrics, figures
        self._simple_layers = _simple_layers(rank.stages.values(), rank.stages.get(rank.view.num_stages - 1))
        self._changed = {stage: ChangedBuffers([module]) for stage, module in rank.stages.items()}

    @contextmanager
    def with_loss(self, wrap: Callable[[LossFunction], LossFunction]) -> Iterator[None]:
        """Use a wrapped loss function within the context."""
        own, self._loss = self._loss, wrap(self._loss)
        try:
            yield
        finally:
            self._loss = own

    def forward(self, action: Action) -> None:
        """Run ``output = stage(input)``, and the loss on the last stage; keep what the backward, or R, needs."""
        place = self._place(action)
        window, stage, microbatch = place
        if not place.samples:
            return
        value = self._input(place)
        again = self._is_recomputed(place)
        elsewhere = self._rank.recomputes_elsewhere(window, stage)
        buffers = self._changed[stage].snapshot() if again and not elsewhere else None
        start = self._rank.timeline.moment()
        with self._rank.transport.exclusive():
            try:
                keeps = window.training and not again
                with self.works.forward(place, value, keeps=keeps), self._dropping() if again else NOTHING:
                    output = self._run(place, value, counts=True)
            except Exception:
                self._rank.buffers.put("input", stage, microbatch, value)  # the error message shows the stage's input
                raise
        self._rank.computed("F", stage, place.number, start)
        self._count_loss(place)
        if buffers is not None:
            buffers.forget_unchanged()
            self._rank.buffers.put("buffers", stage, microbatch, buffers)
        if again:
            output = map_tensors(_as_leaf, output)
        keeps_graph = window.training and not elsewhere
        if keeps_graph:
            self._rank.buffers.put("graph", stage, microbatch, (value, output))
        self._hand_forward(place, output, to_send=not keeps_graph)

    def _dropping(self) -> AbstractContextManager[Any]:
        """The context of a forward whose graph R will make: it is the same forward, but keeps nothing."""
        return saved_tensors_hooks(_drop, _never)

    def _count_loss(self, place: Place) -> None:
        """Count the loss of a micro-batch, and call ``on_losses`` after the last one of a window."""
        window = place.window
        if place.stage == self._rank.view.num_stages - 1 and window.targets is not None:
            window.losses_to_come -= 1
            if not window.losses_to_come:
                self._on_losses(window)

    def _hand_forward(self, place: Place, value: Any, *, to_send: bool) -> None:
        """Keep an output for the next stage: for its F, and for its R if another rank runs that.

        Args:
            place: the forward that made it.
            value: the output.
            to_send: whether the output must be kept to be sent, because no graph keeps it.
        """
        window, stage, microbatch = place.window, place.stage + 1, place.microbatch
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

    def recompute(self, action: Action) -> None:
        """Run the forward again, with the same random numbers and buffers, to make the graph that F did not keep."""
        place = self._place(action)
        window, stage, microbatch = place
        if not place.samples:
            return
        as_before: AbstractContextManager[Any] = NOTHING
        if self._rank.recomputes_elsewhere(window, stage):
            value = self._input(place)
        else:
            value, _ = self._rank.buffers.take("graph", stage, microbatch)
            as_before = self._rank.buffers.take("buffers", stage, microbatch).restored()
        start = self._rank.timeline.moment()
        with self._rank.transport.exclusive(), self.works.forward(place, value, keeps=True), as_before:
            output = self._run(place, value, counts=False)
        self._rank.computed("R", stage, place.number, start)
        self._rank.buffers.put("graph", stage, microbatch, (value, output))

    def _run(self, place: Place, value: Any, *, counts: bool) -> Any:
        """Run a stage and return its output, or the loss on the last stage; ``counts``: add it to the window's loss."""
        module, sharding = self._rank.stages[place.stage], self._rank.sharding
        run = module if sharding is None else sharding.forward
        seed = self._seed_layers(place) if place.window.training else None
        with self._autocasting(), evaluating([module]) if place.is_stand_in else NOTHING:
            output = run(enter_graph(value), seed)
        if place.stage == self._rank.view.num_stages - 1:
            output = self._lose(place, output, counts=counts)
        elif any(tensor._backward_hooks for tensor in flatten(output)[0]):
            output = enter_graph(output)  # hooks on several gradients act once only if none is where a backward begins
        return output

    def _autocasting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return NOTHING
        return torch.autocast(self._rank.transport.device.type, self._autocast)

    def _input(self, place: Place) -> Any:
        window, stage, microbatch = place
        if stage == 0:
            assert window.inputs is not None
            value = window.inputs[place.number]
            if self._rank.stages[0].takes_targets:
                assert window.targets is not None
                value = (value, window.targets[place.number])
            return to_precision(value, self._dtype)
        incoming = self._rank.buffers.take("input", stage, microbatch)
        if not isinstance(incoming, Incoming):
            return incoming
        incoming.wait(self._rank.timeline)
        assert incoming.spec is not None
        return incoming.spec.rebuild(incoming.tensors)

    def _lose(self, place: Place, output: Any, *, counts: bool = True) -> Any:
        """The scaled sum of a micro-batch's loss; adds it to the window's loss. Without targets, keep the output."""
        window = place.window
        if window.targets is None:
            if not place.is_stand_in:
                window.outputs[place.number] = output
            return output
        output = for_loss(output)
        made: Any = self._loss(output, window.targets[place.number])
        total, weight = loss_sum(made, place.samples)
        if not window.training and not place.is_stand_in:
            self._measure(place, output, window.targets[place.number])
        if counts and not place.is_stand_in:
            window.loss[0] += total.detach().double().cpu()
            window.loss[1] += checked_weight(float(weight))
            if window.training and self._figures and isinstance(made, WithFigures):
                window.metrics += made.rows(self._figures, place.samples)
        if place.is_stand_in:
            return total * 0.0
        return total if window.loss_scale == 1.0 else total * window.loss_scale

    def _measure(self, place: Place, output: Any, target: Any) -> None:
        """Add the metrics of a micro-batch to the window's."""
        if self._metrics:
            place.window.metrics += torch.cat([metric.rows(output, target, place.samples) for metric in self._metrics])

    def backward(self, action: Action) -> None:
        """Accumulate gradients of the stage's weights, and keep the gradient of its input for the stage before."""

        def run(leaves: list[Tensor], roots: list[Tensor], gradients: list[Tensor] | None) -> list[Tensor | None]:
            with capturing(leaves) as produced:
                if self._rank.sharding is not None:
                    self._rank.sharding.backward(roots, gradients)
                elif roots:
                    torch.autograd.backward(roots, gradients)
            return produced

        self._backward("B", action, run)

    def backward_input(self, action: Action) -> None:
        """Keep the gradient of the stage's input for the stage before; most weight gradients are left to W."""

        def run(leaves: list[Tensor], roots: list[Tensor], gradients: list[Tensor] | None) -> Sequence[Tensor | None]:
            produced, pending = backward_input(roots, gradients, leaves)
            self._rank.buffers.put("weight_gradients", action.stage, number_of(action), pending)
            return produced

        self._backward("I", action, run)

    def _backward(self, op: str, action: Action, run: _Backward) -> None:
        """Take a forward's graph and the gradients of its output, and hand on the gradients of its input."""
        place = self._place(action)
        if not place.samples:
            return
        value, output = self._rank.buffers.take("graph", place.stage, place.microbatch)
        with self.works.backward(place):
            leaves = [tensor for tensor in flatten(value)[0] if tensor.requires_grad] if place.stage > 0 else []
            roots = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
            gradients = self._output_gradients(place)
            start = self._rank.timeline.moment()
            with self._rank.transport.exclusive():
                produced = run(leaves, roots, gradients)
        self._rank.computed(op, place.stage, place.number, start)
        self._hand_on(place, leaves, produced)

    def backward_weight(self, action: Action) -> None:
        """Accumulate the gradients of the stage's weights that I has left."""
        place = self._place(action)
        if not place.samples:
            return
        pending = self._rank.buffers.take("weight_gradients", place.stage, place.microbatch)
        start = self._rank.timeline.moment()
        with self._rank.transport.exclusive():
            backward_weight(pending)
        self._rank.computed("W", place.stage, place.number, start)

    def _place(self, action: Action) -> Place:
        return Place(self._rank.window_of(action), action.stage, number_of(action))

    def _is_recomputed(self, place: Place) -> bool:
        """Whether R makes the graph, on this or another rank."""
        window = place.window
        if not window.training:
            return False
        schedule = self._rank.schedules[True]
        return schedule.is_recomputed(place.stage, place.number) or schedule.has_other_backward(place.stage)

    def _output_gradients(self, place: Place) -> list[Tensor] | None:
        """The gradients of a stage's output, from the next stage; None on the last one, whose output is the loss."""
        window, stage, microbatch = place
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

    def _hand_on(self, place: Place, value: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a stage's input for the stage before; missing ones are zeros."""
        window, stage, microbatch = place
        if stage == 0:
            return
        made = [torch.zeros_like(t) if g is None else g for t, g in zip(value, gradients, strict=True)]
        kind = "gradient" if self._rank.holds(window, stage - 1, microbatch, Op.B) else "input_gradient"
        if kind == "gradient":  # it waits there, and a part of a larger tensor would keep all of it
            made = [alone(each) for each in made]
        self._rank.buffers.put(kind, stage - 1 if kind == "gradient" else stage, microbatch, made)

    def _seed_layers(self, place: Place) -> Callable[[int], None]:
        """Return a function that seeds a layer from (step, micro-batch over all replicas, layer), so layouts agree.

        The loss draws what comes after the last layer's numbers.
        """
        number = self._rank.view.first_microbatch + place.number

        def seed(layer: int) -> None:
            mixed = mix_seed(self._seed, place.window.step, number, layer)
            seed_torch(mixed) if layer in self._simple_layers else seed_generators(mixed)

        return seed


def _simple_layers(stages: Iterable[StageModule], last: StageModule | None) -> frozenset[int]:
    """The layers for which Python's and NumPy's generators need no seed, which takes longer than a small layer.

    The model's last layer is none of them, because the loss draws after it.
    """
    return frozenset(
        index
        for stage in stages
        for index, layer in enumerate(stage.layers, stage.first_layer)
        if draws_from_torch_alone(layer) and not (stage is last and index == stage.last_layer)
    )


def _as_leaf(tensor: Tensor) -> Tensor:
    """The tensor for the next stage of the same rank: it needs no message, but its graph begins anew."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _drop(tensor: Tensor) -> None:
    """Keep nothing of a saved tensor."""


def _never(dropped: None) -> Tensor:
    raise RuntimeError("a forward that is recomputed has no backward of its own")
