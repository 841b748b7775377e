"""The messages of one rank: sends and receives of activations and gradients, which it owns until they have left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from runner.engine.actions.scattered import Scattering
from runner.engine.context import RankContext, number_of
from runner.engine.measure.timeline import Timeline
from runner.engine.transport.base import Channel, Handle
from runner.engine.window import BoundarySpec, Window
from runner.model.boundary import flatten
from runner.schedule.values import COMPUTE, Action, Op, Payload

__all__ = ["Incoming", "Messages", "Outgoing", "alone"]

_Boundary = tuple[int, int, bool, int, int]
"""A boundary: the stage, the global rank on the other side, and the window's key."""

_CHANNELS = {
    Payload.ACTIVATION: Channel.ACTIVATION,
    Payload.GRADIENT: Channel.GRADIENT,
    Payload.INPUT: Channel.INPUT,
    Payload.STASH: Channel.ACTIVATION,
}


@dataclass
class Incoming:
    """Tensors that are being received; ``complete`` fills what other ranks of a group have received of them."""

    handles: list[Handle]
    tensors: list[Tensor]
    spec: BoundarySpec | None = None
    complete: Callable[[], None] | None = None

    def has_arrived(self) -> bool:
        return all(handle.is_completed() for handle in self.handles)

    def wait(self, timeline: Timeline) -> None:
        """Wait until the tensors have arrived; the time counts as waiting."""
        start = timeline.moment()
        for handle in self.handles:
            handle.wait()
        if self.complete is not None:
            self.complete()
        timeline.add("waiting", start)


class Outgoing(list[tuple[Handle, Tensor]]):
    """Messages that may not have left yet."""

    def wait(self) -> None:
        for handle, _ in self:
            handle.wait()


class Messages:
    """Runs SEND and RECV, including those of a stash; an action that needs a message waits for it.

    Args:
        rank: what the parts of the executor share.
        sizes_vary: whether every boundary is announced anew with each of its messages; else the first time alone.
        scatters: whether each rank of those that divide layers sends a part of a boundary.
    """

    def __init__(self, rank: RankContext, *, sizes_vary: bool = False, scatters: bool = False) -> None:
        self.bytes_sent = dict.fromkeys(Payload, 0)
        self._rank = rank
        self._sizes_vary = sizes_vary
        self._scattering = Scattering(rank.tensor_group if scatters else None)
        self._left: dict[tuple[int, int], BoundarySpec] = {}  # what has left for a while, by stage and micro-batch
        self._specs: dict[_Boundary, BoundarySpec] = {}  # for each stage's input
        self._announced: dict[_Boundary, BoundarySpec] = {}  # for each stage's output
        self._gradient_specs: dict[_Boundary, BoundarySpec] = {}  # for the gradient of each stage's output
        self._announced_gradients: dict[_Boundary, BoundarySpec] = {}  # for the gradient of each stage's input
        self._sends: deque[tuple[Handle, Tensor]] = deque()
        self._posted: set[Action] = set()  # receives that were posted before their turn

    def post_ahead(self, actions: Sequence[Action], start: int) -> None:
        """Post the receives that come before the next compute, so that messages may arrive during this one.

        It stops at unknown shapes, and keeps the order, because each channel is a FIFO.
        """
        for index in range(start, len(actions)):
            action = actions[index]
            if action.op in COMPUTE or (action.op is Op.RECV and not self.may_post(action)):
                return
            if action.op is Op.RECV:
                self.post(action)

    def post(self, action: Action) -> None:
        """Post a receive before its turn; at its turn, :meth:`was_posted` tells so."""
        if action not in self._posted:
            self.receive(action)
            self._posted.add(action)

    def may_post(self, action: Action) -> bool:
        """Whether an action may receive early: its shapes are known, and no tensor must leave first to make room.

        A gradient is received after its own forward: it cannot come sooner, and its memory would lie there unused.
        """
        window = self._rank.window_of(action)
        stage, microbatch = action.stage, number_of(action)
        if not window.size(microbatch):
            return True
        if action.payload is Payload.STASH and stage in self._rank.stages:
            return False  # another micro-batch leaves before this one is back
        key = (stage, self._peer(action), *window.key(microbatch))
        if action.payload is not Payload.GRADIENT:
            return key in self._specs
        made = self._rank.recomputes_elsewhere(window, stage) or self._rank.buffers.has("graph", stage, microbatch)
        return made and key in self._gradient_specs

    def was_posted(self, action: Action) -> bool:
        """Whether a receive was posted before its turn; the note of this is removed."""
        if action not in self._posted:
            return False
        self._posted.remove(action)
        return True

    def drain(self) -> None:
        """Wait for the messages that are still on their way."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def abandon(self) -> None:
        """Wait for all messages in both directions, and drop them with everything else in the buffers."""
        for value in self._rank.buffers.clear():
            if isinstance(value, Incoming):
                value.complete = None  # the others may not come to it
                value.wait(self._rank.timeline)
            elif isinstance(value, Outgoing):
                value.wait()
        self.drain()

    def send(self, action: Action) -> None:
        """Start sending a stage's output, or the gradient of its input."""
        window = self._rank.window_of(action)
        stage, microbatch, payload = action.stage, number_of(action), action.payload
        if not window.size(microbatch):
            return
        peer = self._peer(action)
        key = (stage, peer, *window.key(microbatch))
        sent = Outgoing()
        if payload is Payload.STASH:
            messages = self._leaving(action, key, sent)
        elif payload is Payload.GRADIENT:
            made = self._rank.buffers.take("input_gradient", stage, microbatch)
            spec, messages = self._announce(self._announced_gradients, key, made, sent)
            messages = self._scattering.parts([alone(message) for message in messages], _needing(spec, payload))
        else:
            spec, messages = self._announce(self._announced, key, self._output(action), sent)
            messages = self._scattering.parts(messages, _needing(spec, payload))
        assert payload is not None
        for message in messages:
            if window.training:
                self.bytes_sent[payload] += message.numel() * message.element_size()
            sent.append((self._rank.transport.send(message, peer, _CHANNELS[payload]), message))
        self._keep_until_sent(window, action, sent)

    def _output(self, action: Action) -> Any:
        """The output of a stage, from its graph or from the buffer that keeps it to be sent."""
        place = action.stage, number_of(action)
        if self._rank.buffers.has("graph", *place):
            return self._rank.buffers.peek("graph", *place)[1]
        return self._rank.buffers.take("copy" if action.payload is Payload.INPUT else "output", *place)

    def _leaving(self, action: Action, key: _Boundary, announcing: Outgoing) -> list[Tensor]:
        """The saved tensors of a micro-batch that leave, for the rank that hosts them or back to their owner."""
        stage, microbatch = action.stage, number_of(action)
        if stage not in self._rank.stages:
            hosted: Incoming = self._rank.buffers.take("hosted", stage, microbatch)
            hosted.wait(self._rank.timeline)
            return hosted.tensors
        sent: Outgoing = self._rank.buffers.peek("sent", stage, microbatch)
        sent.wait()
        sent.clear()  # its output has arrived, and leaves with the rest
        boundary = (
            tensor for part in self._rank.buffers.peek("graph", stage, microbatch) for tensor in flatten(part)[0]
        )
        memories = self._rank.buffers.peek("stash", stage, microbatch).leave(boundary)
        self._left[stage, microbatch], messages = self._announce(self._announced, key, memories, announcing)
        return messages

    def _keep_until_sent(self, window: Window, action: Action, sent: Outgoing) -> None:
        """Keep messages until they have left, without waiting for a peer that is still computing.

        An activation has arrived when its gradient comes back, so its backward drops it, if that is on this rank. Other
        messages are dropped when they have left. Those of which a transport does not tell this are waited for when the
        next one has started, because they were due before that one was made.
        """
        if action.payload is Payload.STASH:
            sent.wait()  # its memory is needed for what comes next
            return
        elsewhere = self._rank.recomputes_elsewhere(window, action.stage)
        if action.payload is Payload.ACTIVATION and window.training and not elsewhere:
            self._rank.buffers.put("sent", action.stage, number_of(action), sent)
            return
        while self._sends:
            handle, message = self._sends[0]
            waits = window.training and not self._rank.transport.tells_completion(message.nbytes)
            if not waits and not handle.is_completed():
                break
            handle.wait()
            self._sends.popleft()
        self._sends += sent

    def _announce(
        self, announced: dict[_Boundary, BoundarySpec], key: _Boundary, value: Any, announcing: Outgoing
    ) -> tuple[BoundarySpec, list[Tensor]]:
        """Tell the receiver the shapes and layouts of a boundary: each time, or once if they are always the same.

        Args:
            announced: the shapes that were announced before, by key.
            key: the boundary; contains the receiver.
            value: the boundary's value.
            announcing: the messages that do so are added.

        Returns:
            the boundary's form, and its tensors as messages, without their history.

        Raises:
            RuntimeError: inputs of the same shapes gave another output shape.
        """
        tensors, structure = flatten(value)
        known = announced.get(key)
        if known is None:
            known = BoundarySpec.of(tensors, structure)
            announcing += self._rank.transport.send_bytes(known.to_bytes(), key[1], Channel.SPEC)
            if not self._sizes_vary:
                announced[key] = known
        elif not known.describes(tensors, structure):
            raise RuntimeError(
                f"stage {key[0]} gave {BoundarySpec.of(tensors, structure)}, and {known} for inputs of the same shapes "
                "before; the profile saw no layer that does so. Shapes and plain values between stages may depend on "
                "the values of tensors, but not on a state of the model or on random numbers of Python"
            )
        return known, known.in_memory([tensor.detach() for tensor in tensors])

    def receive(self, action: Action) -> None:
        """Post the receive of a stage's input, or of the gradient of its output."""
        window = self._rank.window_of(action)
        stage, microbatch, payload = action.stage, number_of(action), action.payload
        if not window.size(microbatch):
            return
        peer, spec = self._peer(action), None
        key = (stage, peer, *window.key(microbatch))
        returns = payload is Payload.STASH and stage in self._rank.stages
        if returns:
            known = self._left.pop((stage, microbatch))
        elif payload is Payload.GRADIENT:
            known = self._told(self._gradient_specs, key)
        else:
            known = spec = self._told(self._specs, key)
        assert payload is not None
        tensors = known.allocate(self._rank.transport.device)
        channel, messages, complete = _CHANNELS[payload], known.in_memory(tensors), None
        if payload is not Payload.STASH:
            needing = _needing(known, payload)
            complete = self._scattering.putting_together(messages, needing)
            messages = self._scattering.parts(messages, needing)
        handles = [self._rank.transport.receive(message, peer, channel) for message in messages]
        kinds = {Payload.GRADIENT: "gradient", Payload.STASH: "hosted"}
        kind = "returned" if returns else kinds.get(payload, "input")
        self._rank.buffers.put(kind, stage, microbatch, Incoming(handles, tensors, spec, complete))

    def _told(self, known: dict[_Boundary, BoundarySpec], key: _Boundary) -> BoundarySpec:
        """The shapes of a boundary, which its sender announces the first time, or each time."""
        if key in known:
            return known[key]
        told = BoundarySpec.from_bytes(self._rank.transport.receive_bytes(key[1], Channel.SPEC))
        if not self._sizes_vary:
            known[key] = told
        return told

    def _peer(self, action: Action) -> int:
        assert action.peer is not None
        return self._rank.view.pipeline[action.peer]


def _needing(spec: BoundarySpec, payload: Payload | None) -> list[bool]:
    """For each tensor of a boundary, whether it has a gradient, or is one."""
    return [payload is Payload.GRADIENT or each.requires_grad for each in spec.tensors]


def alone(message: Tensor) -> Tensor:
    """The message, copied if it is a part of larger memory: all of that would stay as long as the message waits."""
    return message.clone() if message.untyped_storage().nbytes() > message.nbytes else message
