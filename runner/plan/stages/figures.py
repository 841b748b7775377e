"""The figures of a stage, which are bytes and seconds of all its layers together for one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from runner.plan.stages.fills import FillRanges, StageFills
from runner.plan.stages.on_the_way import MovedLayer, OnTheWay
from runner.plan.stages.ranges import RangeMaximum, prefix
from runner.plan.stages.split import SplitRanges
from runner.profile import LayerProfile, ModelProfile, SharedWeight

__all__ = ["LayerRanges", "StageFigures", "held_output", "layer_state_bytes", "stage_figures", "state_bytes"]

Pairs = tuple[tuple[int, int], ...]
_STATES = ("weight", "gradient", "optimizer")
_NEVER = -(1 << 62)  # stands for the bytes at a moment that does not occur: less than any real number of them


@dataclass(frozen=True, slots=True)
class StageFigures:
    """Bytes and seconds of one stage for one micro-batch. The last stage includes the loss.

    Args:
        first, last: its first and last layer, inclusive.
        weight_bytes, gradient_bytes: weights of all its layers, and their gradients.
        largest_parameter_bytes: gradient of its largest parameter, or of its largest layer if the former is not known.
        elsewhere_bytes: the gradient of the largest matrix that ranks divide, without this rank's part.
        updates: the bytes of gradients of two parameters that are updated one after the other, the later one first: all
            pairs that no other pair exceeds in both.
        saved_bytes: tensors kept from the end of F to B, including the stage's output, without its input.
        copied_bytes: the part of ``saved_bytes`` that stays on the rank while it lends the rest to another one.
        input_bytes: the boundary tensor that it receives. The first stage's input is a slice of the batch, and this its
            copy in the format of the weights; 0 if it has this format already.
        output_bytes: the boundary tensor that it sends; 0 on the last stage.
        forward_peak_bytes: largest increase during F over what was alive at its start, with what the stage itself moves
            of this micro-batch. :class:`runner.plan.stages.on_the_way.OnTheWay` also knows those before it.
        backward_peak_bytes: largest increase during B over what was alive at its start, which contains ``saved_bytes``
            and the gradient of the output.
        later_backward_peak_bytes: the same from the first gradient of a weight on that B makes.
        growing_backward_peak_bytes: the same if there are no gradients of weights before it: those that are made count.
        backward_start_bytes: like ``backward_peak_bytes``, while B runs the stage's last layer, with which it begins.
        forward_seconds, backward_seconds: sums over its layers.
        input_gradient_seconds, weight_gradient_seconds: seconds of its I and its W, as sums over its layers.
        unsaved_forward_peak_bytes: like ``forward_peak_bytes``, for a forward that keeps only its output.
        input_backward_peak_bytes: like ``backward_peak_bytes``, for I.
        weight_backward_peak_bytes: largest increase during W over what was alive at its start.
        deferred_bytes: tensors kept from the end of I to W, including the gradient of its output, without its input.
        deferred_input_bytes: the part of its input that is kept from the end of I to W.
        input_gradient_bytes, output_gradient_bytes: gradients of the two boundary tensors.
        optimizer_bytes: optimizer states of all its layers, if replicas do not shard them.
        fills: seconds and bytes of its fills.
        moved: its layers in order, if any of the model's moves something to the host's memory.
        home_weight_bytes, home_gradient_bytes, home_optimizer_bytes: the parts of ``weight_bytes``, ``gradient_bytes``
            and ``optimizer_bytes`` that are at home in the host's memory.
        first_backward: where weights are at home in the host's memory, the figures for its first backward of a step.
    """

    first: int
    last: int
    weight_bytes: int
    gradient_bytes: int
    largest_parameter_bytes: int
    saved_bytes: int
    input_bytes: int
    output_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_seconds: float
    backward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    later_backward_peak_bytes: int = 0
    growing_backward_peak_bytes: int = 0
    backward_start_bytes: int = 0
    unsaved_forward_peak_bytes: int = 0
    input_backward_peak_bytes: int = 0
    weight_backward_peak_bytes: int = 0
    deferred_bytes: int = 0
    deferred_input_bytes: int = 0
    input_gradient_bytes: int = 0
    output_gradient_bytes: int = 0
    optimizer_bytes: int = 0
    copied_bytes: int = 0
    fills: StageFills = StageFills()
    updates: Pairs = ()
    elsewhere_bytes: int = 0
    moved: tuple[MovedLayer, ...] = ()
    home_weight_bytes: int = 0
    home_gradient_bytes: int = 0
    home_optimizer_bytes: int = 0
    first_backward: StageFigures | None = None

    @property
    def home_bytes(self) -> int:
        """The bytes that are at home in the host's memory."""
        return self.home_weight_bytes + self.home_gradient_bytes + self.home_optimizer_bytes

    @property
    def moved_bytes(self) -> int:
        """The bytes that it moves to the host's memory after a forward, and back for the backward."""
        return sum(layer.num_bytes for layer in self.moved)

    @property
    def leaving_bytes(self) -> int:
        """The most bytes that may be on their way out at once: those of the layer that moves most."""
        return max((layer.num_bytes for layer in self.moved), default=0)

    @property
    def seconds(self) -> float:
        """The seconds of the forward and the backward of one micro-batch."""
        return self.forward_seconds + self.backward_seconds


class LayerRanges:
    """Gives the figures of any contiguous range of a profile's layers in constant time.

    Sums come from prefix sums, and peaks from range maxima. The search for a partition asks for many ranges.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self._chain = chain = (*profile.layers, profile.loss)
        self._first_backwards = None if profile.first_backwards is None else LayerRanges(profile.first_backwards)
        self._num_layers = len(profile.layers)
        self._cast_bytes = profile.cast_bytes
        self._weights = prefix(layer.weight_bytes for layer in chain)
        self._gradients = prefix(layer.gradient_bytes for layer in chain)
        self._states = list(accumulate((layer_state_bytes(layer, profile) for layer in chain), initial=0.0))
        self._saved = saved = prefix(layer.saved_bytes for layer in chain)
        self._copied = prefix(layer.copied_bytes for layer in chain)
        self._forward_seconds = _sums(layer.forward_seconds for layer in chain)
        self._backward_seconds = _sums(layer.backward_seconds for layer in chain)
        self._input_gradient_seconds = _sums(layer.split_seconds[0] for layer in chain)
        self._weight_gradient_seconds = _sums(layer.split_seconds[1] for layer in chain)
        self._updates = RangeMaximum(_updates(chain), _not_exceeded)
        self._largest = RangeMaximum([_largest(layer) for layer in chain])
        self._elsewhere = RangeMaximum([layer.elsewhere_bytes for layer in chain])
        self._in_w = RangeMaximum([layer.split.made_bytes if layer.split is not None else 0 for layer in chain])
        self._home = [prefix(getattr(layer, f"home_{part}_bytes") for layer in chain) for part in _STATES]
        self._forward = RangeMaximum([saved[at + 1] + layer.forward_transient_bytes for at, layer in enumerate(chain)])
        self._backward = RangeMaximum(
            [
                saved[at + 1] + layer.gradient_of_output_bytes + layer.inner_backward_bytes
                for at, layer in enumerate(chain)
            ]
        )
        gradients = self._gradients
        self._growing = RangeMaximum(  # of gradients, those of the layers up to it are subtracted
            [
                saved[at + 1]
                + layer.gradient_of_output_bytes
                + max(layer.inner_backward_bytes, layer.gradient_peak_bytes(chained=True, keeping=True))
                - gradients[at + 1]
                for at, layer in enumerate(chain)
            ]
        )
        self._unsaved = _UnsavedForwards(chain)
        self._split = SplitRanges(chain, saved)
        self._fills = FillRanges(chain, saved)
        self._passed_on = _PassedOn(chain)
        self._moves = any(layer.moved_bytes for layer in chain)
        trained = accumulate((at if layer.gradient_bytes else -1 for at, layer in enumerate(chain)), max)
        self._last_trained = list(trained)  # by layer, among those up to it; -1: none

    def figures(self, first: int, last: int) -> StageFigures:
        """The figures of a stage with the layers from ``first`` to ``last``, inclusive."""
        layers = self._chain
        is_last = last == self._num_layers - 1
        end = last + 2 if is_last else last + 1  # the loss is one more layer
        output_bytes = 0 if is_last else layers[last].output_bytes
        input_bytes = self._cast_bytes if first == 0 else layers[first - 1].output_bytes
        pending = layers[end - 1].pending_output_bytes  # only a later stage's layer counts it among its saved bytes
        held = 0 if is_last else held_output(layers[last])
        of_i = layers[end - 1].output_bytes if is_last else held
        ending = self._ending_bytes(first, end, pending, of_i)
        moved = self._moved(first, end, held, of_i, ending) if self._moves else ()
        of_output = 0 if is_last else layers[last].gradient_of_output_bytes
        deferred = self._split.deferred(first, end)
        made = self._gradients[end] - self._gradients[first]
        return StageFigures(
            first=first,
            last=last,
            weight_bytes=self._weights[end] - self._weights[first],
            gradient_bytes=made,
            largest_parameter_bytes=self._largest.over(first, end),
            weight_backward_peak_bytes=max(self._largest.over(first, end), self._in_w.over(first, end)),
            updates=self._updates.over(first, end),
            elsewhere_bytes=self._elsewhere.over(first, end),
            saved_bytes=self._saved[end] - self._saved[first] + pending,
            copied_bytes=self._copied[end] - self._copied[first],
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            forward_peak_bytes=self._forward_peak(first, end, moved),
            backward_peak_bytes=max(ending, self._backward_peak(first, end, held, moved)),
            later_backward_peak_bytes=max(ending, self._later_backward_peak(first, end, held, moved)),
            growing_backward_peak_bytes=max(ending + made, self._growing_backward_peak(first, end, held, moved)),
            backward_start_bytes=layers[end - 1].backward_transient_bytes,
            forward_seconds=self._forward_seconds[end] - self._forward_seconds[first],
            backward_seconds=self._backward_seconds[end] - self._backward_seconds[first],
            input_gradient_seconds=self._input_gradient_seconds[end] - self._input_gradient_seconds[first],
            weight_gradient_seconds=self._weight_gradient_seconds[end] - self._weight_gradient_seconds[first],
            unsaved_forward_peak_bytes=self._unsaved.over(first, end),
            input_backward_peak_bytes=max(
                ending + deferred - self._split.callers(end), self._split.peak(first, end, of_i)
            ),
            deferred_bytes=deferred,
            deferred_input_bytes=min(self._split.of_input(first), input_bytes),
            input_gradient_bytes=0 if first == 0 else layers[first - 1].gradient_of_output_bytes,
            output_gradient_bytes=of_output,
            optimizer_bytes=round(self._states[end] - self._states[first]),
            fills=self._fills.of(first, end, held),
            moved=moved,
            first_backward=self._first_backwards.figures(first, last) if self._first_backwards is not None else None,
            **{f"home_{part}_bytes": sums[end] - sums[first] for part, sums in zip(_STATES, self._home, strict=True)},
        )

    def _ending_bytes(self, first: int, end: int, pending_bytes: int, held_output_bytes: int) -> int:
        """The increase at the end of a backward, when all gradients of the stage's input are there.

        Those of tensors that the stage neither uses nor passes on are zeros that are made only then. Those of tensors
        that it passes on are the gradients of its output, which its caller holds.
        """
        if first == 0:
            return _NEVER
        gradients = self._chain[first - 1].gradient_of_output_bytes - self._passed_on.gradient_bytes(first, end)
        home = self._chain[first].fetched_bytes
        return gradients + home + held_output_bytes - (self._saved[end] - self._saved[first] + pending_bytes)

    def _moved(
        self, first: int, end: int, held_output_bytes: int, held_in_i: int, ending_bytes: int
    ) -> tuple[MovedLayer, ...]:
        """The layers of a stage, each with its own peaks; the outputs are those that the caller holds in B and in I."""
        found = []
        for at in range(first, end):
            layer, backward = self._chain[at], self._chain[at].backward_transient_bytes
            asking = layer.moves.asking_bytes
            if at < end - 1:
                so_far = self._saved[at + 1] - self._saved[end] + held_output_bytes
                backward = so_far + layer.gradient_of_output_bytes + layer.inner_backward_bytes
                asking = max(0, so_far + layer.gradient_of_output_bytes + asking) if asking else 0
            if at == first:
                backward = max(backward, ending_bytes)
            forward = self._saved[at + 1] - self._saved[first] + layer.forward_transient_bytes
            of_i = self._split.peak_of_layer(at, end, held_in_i)
            seconds = layer.forward_seconds, layer.backward_seconds
            found.append(MovedLayer(layer.moves, *seconds, forward, backward, of_i, asking))
        return tuple(found)

    def _forward_peak(self, first: int, end: int, moved: Sequence[MovedLayer]) -> int:
        if moved:
            return OnTheWay(max(layer.num_bytes for layer in moved)).forward((0, 0), moved)
        return self._forward.over(first, end) - self._saved[first]

    def _backward_peak(self, first: int, end: int, held_output_bytes: int, moved: Sequence[MovedLayer]) -> int:
        """The peak of a backward, which runs the layers from the last to the first.

        Bytes that later layers have freed are subtracted from the transient bytes of earlier layers. The stage's output
        and its gradient stay until B ends, because the caller of autograd holds both. Therefore the gradient of the
        last layer's output is not counted as this layer's own, and its output is not counted as freed.
        """
        if moved:
            return OnTheWay(0).backward((0, 0), moved)
        peak = self._chain[end - 1].backward_transient_bytes
        if end - 1 > first:
            peak = max(peak, self._backward.over(first, end - 1) - self._saved[end] + held_output_bytes)
        return max(peak, 0)

    def _later_backward_peak(self, first: int, end: int, held_output_bytes: int, moved: Sequence[MovedLayer]) -> int:
        """The peak of a backward from its first gradient of a weight on, in the last layer with trained weights."""
        last = self._last_trained[end - 1]
        if moved:
            return self._backward_peak(first, end, held_output_bytes, moved)
        if last < first:
            return 0
        of_others = held_output_bytes - self._saved[end]
        peak = self._from_gradient(last, end, of_others, keeping=False)
        if last > first:
            peak = max(peak, self._backward.over(first, last) + of_others)
        return max(peak, 0)

    def _growing_backward_peak(self, first: int, end: int, held_output_bytes: int, moved: Sequence[MovedLayer]) -> int:
        """The same if there are no gradients before, so that those of later layers and of the layer itself count."""
        last = self._last_trained[end - 1]
        if moved:
            whole = self._gradients[end] - self._gradients[first]
            return self._backward_peak(first, end, held_output_bytes, moved) + whole
        if last < first:
            return 0
        of_others = held_output_bytes - self._saved[end]
        peak = self._from_gradient(last, end, of_others, keeping=True)
        if last > first:
            peak = max(peak, self._growing.over(first, last) + self._gradients[end] + of_others)
        return max(peak, 0)

    def _from_gradient(self, at: int, end: int, of_others: int, *, keeping: bool) -> int:
        """The peak of a layer's backward from its first gradient on, above what was alive when the stage's began.

        ``of_others`` is what the stage's caller holds of the output, less all that the stage has saved.
        """
        layer, chained = self._chain[at], at < end - 1
        peak = layer.gradient_peak_bytes(chained=chained, keeping=keeping)
        return self._saved[at + 1] + layer.gradient_of_output_bytes + peak + of_others if chained else peak


def stage_figures(profile: ModelProfile, partition: Sequence[tuple[int, int]]) -> tuple[StageFigures, ...]:
    """The figures of each stage of a partition, which lists the first and last layer of each stage, inclusive."""
    ranges = LayerRanges(profile)
    return tuple(ranges.figures(first, last) for first, last in partition)


def state_bytes(held: LayerProfile | SharedWeight, ratio: float) -> float:
    """The bytes of the optimizer's states for a layer or a shared weight."""
    return ratio * held.gradient_bytes if held.optimizer_bytes is None else held.optimizer_bytes


def layer_state_bytes(layer: LayerProfile, profile: ModelProfile) -> float:
    """The bytes of the optimizer's states for a layer of a profile, of whose weights some may have none."""
    late = profile.states_per_gradient_byte * layer.unreached_bytes if layer.optimizer_bytes is None else 0.0
    return state_bytes(layer, profile.optimizer_bytes_per_gradient_byte) - late


def _updates(chain: Sequence[LayerProfile]) -> list[Pairs]:
    """For each layer, its parameters with those that are updated before them, as :attr:`StageFigures.updates`."""
    found: list[Pairs] = []
    before = 0
    for layer in chain:
        sizes = _parameter_bytes(layer)
        found.append(_not_exceeded(tuple(zip(sizes, [before, *sizes], strict=False)), ()))
        before = sizes[-1] if sizes else before
    return found


def _largest(layer: LayerProfile) -> int:
    """The bytes of the gradient of the largest parameter that is updated on the device."""
    if layer.unreached_bytes and not layer.home_gradient_bytes:
        return max(_parameter_bytes(layer), default=0)
    largest = layer.largest_parameter_bytes or layer.gradient_bytes
    return min(largest, layer.gradient_bytes - layer.home_gradient_bytes) if layer.home_gradient_bytes else largest


def _parameter_bytes(layer: LayerProfile) -> list[int]:
    """The bytes of the gradients of its parameters that are updated, in order; of one, if only the largest is known."""
    numbers = [math.prod(shape) for shape in layer.trained_shapes]
    if layer.home_gradient_bytes or not any(numbers):
        return [_largest(layer)] if _largest(layer) else []
    updated = (number for at, number in enumerate(numbers) if at not in layer.unreached)
    return [number * layer.gradient_bytes // sum(numbers) for number in updated]


def _not_exceeded(some: Pairs, others: Pairs) -> Pairs:
    """The pairs that no other pair exceeds in both."""
    found: list[tuple[int, int]] = []
    for pair in sorted({*some, *others}, reverse=True):
        if not found or pair[1] > found[-1][1]:
            found.append(pair)
    return tuple(found)


class _PassedOn:
    """Knows which tensors of a stage's input it only passes on, so that their gradients are those of its output."""

    def __init__(self, chain: Sequence[LayerProfile]) -> None:
        self._inputs: list[tuple[tuple[int, int], ...]] = [()] * len(chain)  # (gradient's bytes, end of longest stage)
        after: dict[int, int] = {}  # of the next layer's input: storage -> that end
        for at in range(len(chain) - 1, 0, -1):
            layer, given = chain[at], chain[at - 1].output
            read = {tensor.storage for tensor in given} if layer.reads is None else set(layer.reads)
            passed = {tensor.storage for tensor in layer.output} - read
            here = {tensor.storage: after.get(tensor.storage, at + 1) for tensor in given if tensor.storage in passed}
            self._inputs[at] = tuple(
                (tensor.gradient_bytes, here[tensor.storage]) for tensor in given if tensor.storage in here
            )
            after = here

    def gradient_bytes(self, first: int, end: int) -> int:
        """The bytes of gradients that pass unchanged through a stage with the layers from first to end - 1."""
        return sum(num_bytes for num_bytes, longest in self._inputs[first] if end <= longest)


class _UnsavedForwards:
    """Peaks of forwards that save nothing: those of each layer, and its input if a layer before it has made it."""

    def __init__(self, chain: Sequence[LayerProfile]) -> None:
        self._alone = [_unsaved(layer) for layer in chain]
        inputs = [0, *(layer.output_bytes for layer in chain[:-1])]
        self._following = RangeMaximum([sum(pair) for pair in zip(self._alone, inputs, strict=True)])

    def over(self, first: int, end: int) -> int:
        """The peak over layers first to end - 1."""
        rest = self._following.over(first + 1, end) if end - first > 1 else 0
        return max(self._alone[first], rest)


def _sums(seconds: Iterable[float]) -> list[float]:
    """The prefix sums of ``seconds``, beginning with 0."""
    return list(accumulate(seconds, initial=0.0))


def held_output(layer: LayerProfile) -> int:
    """The bytes of a stage's output that are counted among its saved bytes."""
    held = layer.output_bytes if layer.held_output_bytes is None else layer.held_output_bytes
    return held + layer.pending_output_bytes


def _unsaved(layer: LayerProfile) -> int:
    known = layer.unsaved_forward_bytes
    return layer.saved_bytes + layer.forward_transient_bytes if known is None else known
